#include "rank_times.h"

#include <utility>

namespace adaptrt {

void RankTimes::begin_step(const StepInput& input) {
  if (!profile_) return;
  profile_->begin_joined(record_of(input));
  last_ = profile_->now();
}

void RankTimes::end_step() {
  if (profile_) profile_->end_joined();
}

void RankTimes::leave_out() {
  if (profile_) last_ = profile_->now();
}

RowSink RankTimes::timed(const RowSink& sink) {
  if (!profile_ || !sink) return sink;
  return [this, &sink](std::int64_t first_row, std::int64_t rows, const float* values) {
    take(RankWork::kResults);
    sink(first_row, rows, values);
    take(StepSection::kSink, 0);
  };
}

void RankTimes::take(StepSection section, std::int32_t index) {
  if (!profile_) return;
  const double end = profile_->now();
  profile_->add_to_joined({.section = section,
                           .index = index,
                           .begin = std::exchange(last_, end),
                           .end = end,
                           .cost = {},
                           .busy_seconds = {}});
}

}  // namespace adaptrt
