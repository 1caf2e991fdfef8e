#include "step_recorder.h"

#include <set>
#include <utility>

namespace adaptrt {

StepRecorder::StepRecorder(std::shared_ptr<StepProfile> profile, ThreadPool& threads)
    : profile_(std::move(profile)), threads_(threads) {
  threads_.measure_busy_time();
}

void StepRecorder::begin_step(const StepInput& input) {
  std::set<const DeviceAdapter*> adapters(input.adapters.begin(), input.adapters.end());
  adapters.erase(nullptr);
  step_ = {.begin = now(),
           .num_tokens = static_cast<std::int64_t>(input.token_ids.size()),
           .num_sequences = static_cast<std::int64_t>(input.prompt_lengths.size()),
           .num_adapters = static_cast<std::int64_t>(adapters.size()),
           .num_logit_rows = static_cast<std::int64_t>(input.logit_rows.size()),
           .ops = {}};
}

void StepRecorder::end_step() {
  step_.end = now();
  profile_->add(std::exchange(step_, {}));
}

void StepRecorder::begin_op() {
  op_begin_ = now();
}

void StepRecorder::take_times(StepSection section, std::int32_t index) {
  step_.ops.push_back({.section = section,
                       .index = index,
                       .begin = op_begin_,
                       .end = now(),
                       .cost = {},
                       .busy_seconds = threads_.take_busy_seconds()});
}

double StepRecorder::now() const {
  return std::chrono::duration<double>(Clock::now() - made_).count();
}

}  // namespace adaptrt
