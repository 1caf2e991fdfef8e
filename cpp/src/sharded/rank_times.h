#pragma once

#include <memory>

#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/step_profile.h"
#include "rank_commands.h"

namespace adaptrt {

/// Records the time that rank 0 spends in addition to its own program, which records its own ops. Without a
/// profile it records nothing. Times are taken one after another, each from the end of the previous one.
class RankTimes {
 public:
  explicit RankTimes(std::shared_ptr<StepProfile> profile) : profile_(std::move(profile)) {}

  void begin_step(const StepInput& input);
  void end_step();

  /// Excludes the following work, which others record.
  void leave_out();
  void take(RankWork work) { take(StepSection::kRanks, static_cast<std::int32_t>(work)); }
  /// Wraps a sink: records the time of waiting for results and of the sink. An empty sink stays empty.
  [[nodiscard]] RowSink timed(const RowSink& sink);

 private:
  void take(StepSection section, std::int32_t index);

  std::shared_ptr<StepProfile> profile_;
  double last_ = 0.0;
};

}  // namespace adaptrt
