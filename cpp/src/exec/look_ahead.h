#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/kv/sequence_memory.h"
#include "adaptrt/sched/scheduler.h"
#include "step_builder.h"

namespace adaptrt {

/// Begins a step on the engine while the host still waits for the tokens of the step before, if the step
/// needs nothing of the host. A sequence that ends with these tokens has computed a row too many, whose
/// results are ignored: its KV is in no block that others can reuse.
class LookAhead {
 public:
  /// Nothing is begun ahead with states, which a row too many would change, and with a second level, which
  /// reads KV blocks between steps. All arguments outlive the object, except `builder`, which is copied.
  LookAhead(Engine& engine, Scheduler& scheduler, const StepBuilder& builder)
      : engine_(engine),
        scheduler_(scheduler),
        is_possible_(engine.can_look_ahead() && !scheduler.memory().has_states() &&
                     !scheduler.memory().has_second_level()),
        step_(builder) {}

  /// Begins the step after `plan`, which the engine has begun as `step`, if that is possible. Throws
  /// EngineError.
  void begin(const StepPlan& plan, const StepBuilder& step);
  /// Makes the step that was begun ahead the next one: swaps it with `plan` and `step`. Sequences that have
  /// left the scheduler are not in its plan and get no results. Returns false if there is none. Throws
  /// EngineError.
  bool take(StepPlan& plan, StepBuilder& step);
  /// Waits for the step that was begun ahead, if there is one, and ignores its results. Throws EngineError.
  void discard();
  /// discard() if all sequences of the step have left the scheduler.
  void discard_if_unused() {
    if (plan_.empty()) discard();
  }

 private:
  Engine& engine_;
  Scheduler& scheduler_;
  const bool is_possible_;
  bool is_begun_ = false;
  StepPlan plan_;
  StepBuilder step_;
  std::vector<std::int32_t> previous_rows_;
};

}  // namespace adaptrt
