#include "adaptrt/guide/token_guide.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace adaptrt {

namespace {

/// Steps with up to this many guided sequences allocate nothing.
constexpr std::size_t kManySequences = 1024;

}  // namespace

std::shared_ptr<TokenGuide> TokenGuide::begin(std::unique_ptr<GrammarState> grammar, std::int64_t vocab_size,
                                              std::span<const std::int32_t> stop_token_ids,
                                              MaskThread& thread) {
  std::shared_ptr<TokenGuide> guide(new TokenGuide(std::move(grammar), vocab_size, stop_token_ids, thread));
  thread.prepare(guide);
  return guide;
}

TokenGuide::TokenGuide(std::unique_ptr<GrammarState> grammar, std::int64_t vocab_size,
                       std::span<const std::int32_t> stop_token_ids, MaskThread& thread)
    : grammar_(std::move(grammar)),
      stop_token_ids_(stop_token_ids),
      thread_(thread),
      mask_(static_cast<std::size_t>((vocab_size + 31) / 32)) {}

std::span<const std::uint32_t> TokenGuide::mask() {
  make();
  stage_.wait(Stage::kInTheMaking, std::memory_order_acquire);
  if (!error_.empty()) throw StepError(error_);
  return mask_;
}

void TokenGuide::accept(std::int32_t token) {
  chosen_ = token;
  stage_.store(Stage::kWanted, std::memory_order_release);
  thread_.prepare(shared_from_this());
}

bool TokenGuide::is_stop_token(std::int32_t token) const {
  return std::ranges::find(stop_token_ids_, token) != stop_token_ids_.end();
}

void TokenGuide::make() {
  auto wanted = Stage::kWanted;
  if (!stage_.compare_exchange_strong(wanted, Stage::kInTheMaking, std::memory_order_acq_rel)) return;
  try {
    if (chosen_) grammar_->accept(*std::exchange(chosen_, std::nullopt));
    grammar_->fill_mask(mask_);
  } catch (const std::exception& error) {
    error_ = std::string("guided decoding: ") + error.what();
  }
  stage_.store(Stage::kReady, std::memory_order_release);
  stage_.notify_all();
}

MaskThread::MaskThread() {
  wanted_.reserve(kManySequences);
  thread_ = std::thread([this] { run(); });
}

MaskThread::~MaskThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void MaskThread::prepare(std::shared_ptr<TokenGuide> guide) {
  {
    const std::lock_guard lock(mutex_);
    wanted_.push_back(std::move(guide));
  }
  changed_.notify_one();
}

void MaskThread::run() {
  std::vector<std::shared_ptr<TokenGuide>> guides;
  guides.reserve(kManySequences);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !wanted_.empty(); });
    if (stop_) return;
    guides.swap(wanted_);
    lock.unlock();
    for (const auto& guide : guides) guide->make();
    guides.clear();
    lock.lock();
  }
}

}  // namespace adaptrt
