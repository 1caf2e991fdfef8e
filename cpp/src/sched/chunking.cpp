// Sharing of a step's tokens among prompts.

#include <algorithm>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

void Scheduler::distribute_tokens(StepPlan& plan) {
  if (config_.context_chunking_policy != ContextChunkingPolicy::kEqualProgress) return;
  for (bool any_took = true; any_took && tokens_left(plan) > 0;) {
    any_took = false;
    for (PlannedSequence& entry : plan.entries) {
      if (!entry.is_prefill) continue;
      const std::int32_t most = std::min(most_in_step(*entry.sequence), room_for(*entry.sequence));
      const std::int32_t more = std::min({tokens_left(plan), chunk_unit_, most - entry.count});
      if (more <= 0) continue;
      grow_entry(entry, more, plan);
      any_took = true;
    }
  }
}

}  // namespace adaptrt
