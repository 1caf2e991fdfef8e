#include "adaptrt/sched/scheduler_config.h"

namespace adaptrt {

Problems SchedulerConfig::validate() const {
  Problems problems;
  if (context_chunking_policy == ContextChunkingPolicy::kEqualProgress) {
    problems.add(
        "context_chunking_policy is EQUAL_PROGRESS; prompts are computed in the order of their arrival, so "
        "only "
        "FIRST_COME_FIRST_SERVED is accepted");
  }
  return problems;
}

}  // namespace adaptrt
