#pragma once

#include <cstdint>
#include <memory>

#include "adaptrt/core/thread_pool.h"
#include "adaptrt/engine/step_profile.h"
#include "adaptrt/program/ops.h"
#include "context.h"

namespace adaptrt {

/// Minimum cost of an op of this step.
[[nodiscard]] OpCost cost_of(const Op& op, const CpuContext& context, const Step& step);

/// Times the ops of an engine's steps for a StepProfile. Engines without a profile have no recorder.
class StepRecorder {
 public:
  /// `threads` must outlive this object. It measures its busy time from now on.
  StepRecorder(std::shared_ptr<StepProfile> profile, ThreadPool& threads);

  /// Begins a step. A step that does not end, because it throws, leaves no record.
  void begin_step(const StepInput& input);
  void end_step();

  void begin_op(StepSection section, std::size_t index);
  /// Calls `cost` after it has taken the op's time.
  template <class Cost>
  void end_op(const Cost& cost) {
    take_times(section_, index_);
    step_.ops.back().cost = cost();
  }

  /// Begin and end of an exchange within an op. The parts of the op are recorded separately.
  void begin_exchange();
  void end_exchange(RankWork work);

 private:
  void take_times(StepSection section, std::int32_t index);

  std::shared_ptr<StepProfile> profile_;
  ThreadPool& threads_;
  StepRecord step_;
  /// State of the current op.
  StepSection section_ = StepSection::kBody;
  std::int32_t index_ = 0;
  bool is_continued_ = false;
  /// Start of the next record.
  double begin_ = 0.0;
};

}  // namespace adaptrt
