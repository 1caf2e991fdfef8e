#include "adaptrt/engine/step_profile.h"

#include <iterator>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

StepProfile::StepProfile(std::size_t max_steps) : max_steps_(max_steps) {
  if (max_steps == 0) throw ConfigError("StepProfile: max_steps is 0; accepted: 1 and more");
}

void StepProfile::add(StepRecord record) {
  const std::lock_guard lock(mutex_);
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
