#include "step_recorder.h"

#include <utility>

namespace adaptrt {

StepRecorder::StepRecorder(std::shared_ptr<StepProfile> profile, ThreadPool& threads)
    : profile_(std::move(profile)), threads_(threads) {
  threads_.measure_busy_time();
}

void StepRecorder::begin_step(const StepInput& input) {
  step_ = record_of(input);
  step_.begin = profile_->now();
}

void StepRecorder::end_step() {
  step_.end = profile_->now();
  profile_->add(std::exchange(step_, {}));
}

void StepRecorder::begin_op() {
  op_begin_ = profile_->now();
}

void StepRecorder::take_times(StepSection section, std::int32_t index) {
  step_.ops.push_back({.section = section,
                       .index = index,
                       .begin = op_begin_,
                       .end = profile_->now(),
                       .cost = {},
                       .busy_seconds = threads_.take_busy_seconds()});
}

}  // namespace adaptrt
