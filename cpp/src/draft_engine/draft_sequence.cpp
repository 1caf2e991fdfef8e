#include <utility>

#include "adaptrt/draft_engine/draft_engine.h"

namespace adaptrt {

DraftSequence::~DraftSequence() {
  if (holder_ != nullptr) holder_->release(*this);
}

void DraftSequence::set(std::shared_ptr<const HostAdapter> adapter, std::optional<std::uint64_t> cache_salt) {
  adapter_ = std::move(adapter);
  cache_salt_ = cache_salt;
}

void DraftSequence::keep_right_drafts(std::span<const std::int32_t> text) {
  for (const std::int32_t draft : computed_drafts_) {
    const auto next = static_cast<std::size_t>(num_computed_);
    if (next + 1 >= text.size() || text[next] != draft) break;
    ++num_computed_;
  }
  computed_drafts_.clear();
}

ReuseKey DraftSequence::reuse_key() const {
  if (!adapter_) return {.cache_salt = cache_salt_};
  return {.adapter_generation = adapter_->generation(),
          .cache_salt = cache_salt_,
          .task_id = adapter_->task_id()};
}

}  // namespace adaptrt
