#include "adaptrt/sched/scheduler_config.h"

namespace adaptrt {

Problems SchedulerConfig::validate(bool enable_chunked_context) const {
  Problems problems;
  if (context_chunking_policy == ContextChunkingPolicy::kEqualProgress && !enable_chunked_context) {
    problems.add(
        "context_chunking_policy is EQUAL_PROGRESS, but enable_chunked_context is False, so that there are "
        "no chunks; "
        "accepted: FIRST_COME_FIRST_SERVED, or EQUAL_PROGRESS with enable_chunked_context");
  }
  return problems;
}

}  // namespace adaptrt
