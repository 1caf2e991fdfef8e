#include "adaptrt/sched/scheduler_config.h"

namespace adaptrt {

Problems SchedulerConfig::validate() const {
  Problems problems;
  if (dynamic_batch_config) {
    problems.add(
        "dynamic_batch_config is set; max_batch_size and max_num_tokens are not tuned while running");
  }
  return problems;
}

Problems SchedulerConfig::validate(bool enable_chunked_context) const {
  Problems problems = validate();
  if (context_chunking_policy == ContextChunkingPolicy::kEqualProgress && !enable_chunked_context) {
    problems.add(
        "context_chunking_policy is EQUAL_PROGRESS, but enable_chunked_context is False, so that there are "
        "no "
        "chunks; accepted: FIRST_COME_FIRST_SERVED, or EQUAL_PROGRESS with enable_chunked_context");
  }
  return problems;
}

}  // namespace adaptrt
