#pragma once

#include <cstdint>
#include <memory>

#include "adaptrt/core/thread_pool.h"
#include "adaptrt/engine/program.h"
#include "adaptrt/engine/step_profile.h"
#include "step.h"

namespace adaptrt {

/// What an op of this step costs at least.
[[nodiscard]] OpCost cost_of(const Op& op, const Step& step);

/// Times the ops of an engine's steps for a StepProfile. An engine without a profile has none of these.
class StepRecorder {
 public:
  /// `threads` outlives this and measures its busy time from now on.
  StepRecorder(std::shared_ptr<StepProfile> profile, ThreadPool& threads);

  /// A step that is begun and not ended, because it threw, leaves no record.
  void begin_step(const StepInput& input);
  void end_step();

  void begin_op();
  /// `cost` is called after the op's time was taken.
  template <class Cost>
  void end_op(StepSection section, std::size_t index, const Cost& cost) {
    take_times(section, static_cast<std::int32_t>(index));
    step_.ops.back().cost = cost();
  }

 private:
  void take_times(StepSection section, std::int32_t index);

  std::shared_ptr<StepProfile> profile_;
  ThreadPool& threads_;
  StepRecord step_;
  double op_begin_ = 0.0;
};

}  // namespace adaptrt
