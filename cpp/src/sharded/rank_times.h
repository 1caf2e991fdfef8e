#pragma once

#include <memory>

#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/step_profile.h"
#include "rank_commands.h"

namespace adaptrt {

/// What rank 0's steps take beside those of its own program, which records its own ops: for the profile of
/// whole steps, or for nobody. Times are taken one after another, each from the end of the one before it.
class RankTimes {
 public:
  explicit RankTimes(std::shared_ptr<StepProfile> profile) : profile_(std::move(profile)) {}

  void begin_step(const StepInput& input);
  void end_step();

  /// What runs from here on is recorded by others.
  void leave_out();
  void take(RankWork work) { take(StepSection::kRanks, static_cast<std::int32_t>(work)); }
  /// A sink before which results are waited for; both are recorded. An empty one stays empty.
  [[nodiscard]] RowSink timed(const RowSink& sink);

 private:
  void take(StepSection section, std::int32_t index);

  std::shared_ptr<StepProfile> profile_;
  double last_ = 0.0;
};

}  // namespace adaptrt
