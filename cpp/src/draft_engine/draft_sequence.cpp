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

std::int32_t DraftSequence::num_right_drafts(std::span<const std::int32_t> text) const {
  const auto first = static_cast<std::size_t>(memory_.num_computed);
  std::size_t count = 0;
  while (count < computed_drafts_.size() && first + count + 1 < text.size() &&
         text[first + count] == computed_drafts_[count]) {
    ++count;
  }
  return static_cast<std::int32_t>(count);
}

ReuseKey DraftSequence::reuse_key() const {
  if (!adapter_) return {.cache_salt = cache_salt_};
  return {.adapter_generation = adapter_->generation(),
          .cache_salt = cache_salt_,
          .task_id = adapter_->task_id()};
}

}  // namespace adaptrt
