#include "adaptrt/engine/step_profile.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt {

StepRecord record_of(const StepInput& input) {
  std::set<const DeviceAdapter*> adapters(input.adapters.begin(), input.adapters.end());
  adapters.erase(nullptr);
  return {.num_tokens = static_cast<std::int64_t>(input.token_ids.size()),
          .num_sequences = static_cast<std::int64_t>(input.prompt_lengths.size()),
          .num_adapters = static_cast<std::int64_t>(adapters.size()),
          .num_logit_rows = static_cast<std::int64_t>(input.logit_rows.size()),
          .ops = {}};
}

StepProfile::StepProfile(std::size_t max_steps) : max_steps_(max_steps) {
  if (max_steps == 0) throw ConfigError("StepProfile: max_steps is 0; accepted: 1 and more");
}

double StepProfile::now() const {
  return std::chrono::duration<double>(Clock::now() - made_).count();
}

void StepProfile::add(StepRecord record) {
  const std::lock_guard lock(mutex_);
  if (joined_) {
    std::ranges::move(record.ops, std::back_inserter(joined_->ops));
  } else {
    keep(std::move(record));
  }
}

void StepProfile::begin_joined(StepRecord record) {
  const std::lock_guard lock(mutex_);
  joined_ = std::move(record);
  joined_->begin = now();
}

void StepProfile::add_to_joined(OpRecord op) {
  const std::lock_guard lock(mutex_);
  if (joined_) joined_->ops.push_back(std::move(op));
}

void StepProfile::end_joined() {
  const std::lock_guard lock(mutex_);
  if (!joined_) return;
  joined_->end = now();
  keep(*std::exchange(joined_, std::nullopt));
}

void StepProfile::keep(StepRecord record) {
  if (steps_.size() == max_steps_) steps_.pop_front();
  steps_.push_back(std::move(record));
}

std::vector<StepRecord> StepProfile::take_steps() {
  const std::lock_guard lock(mutex_);
  std::vector<StepRecord> taken(std::make_move_iterator(steps_.begin()),
                                std::make_move_iterator(steps_.end()));
  steps_.clear();
  return taken;
}

}  // namespace adaptrt
