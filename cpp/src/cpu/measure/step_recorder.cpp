#include "measure/step_recorder.h"

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

void StepRecorder::begin_op(StepSection section, std::size_t index) {
  section_ = section;
  index_ = static_cast<std::int32_t>(index);
  is_continued_ = false;
  begin_ = profile_->now();
}

void StepRecorder::begin_exchange() {
  take_times(section_, index_);
  is_continued_ = false;
}

void StepRecorder::end_exchange(RankWork work) {
  take_times(StepSection::kRanks, static_cast<std::int32_t>(work));
  is_continued_ = true;
}

void StepRecorder::take_times(StepSection section, std::int32_t index) {
  const double end = profile_->now();
  step_.ops.push_back({.section = section,
                       .index = index,
                       .begin = std::exchange(begin_, end),
                       .end = end,
                       .is_continued = is_continued_,
                       .cost = {},
                       .busy_seconds = threads_.take_busy_seconds()});
}

}  // namespace adaptrt
