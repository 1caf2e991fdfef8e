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
  if (dynamic_batch_config) {
    problems.add(
        "dynamic_batch_config is set; max_batch_size and max_num_tokens are not tuned while running");
  }
  return problems;
}

}  // namespace adaptrt
