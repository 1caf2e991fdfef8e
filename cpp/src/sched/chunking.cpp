// Sharing of a step's tokens among prompts.

#include <algorithm>
#include <iterator>
#include <limits>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

void Scheduler::distribute_tokens(StepPlan& plan) {
  if (config_.context_chunking_policy != ContextChunkingPolicy::kEqualProgress) return;
  for (bool any_took = true; any_took && tokens_left(plan) > 0;) {
    any_took = false;
    for (PlannedSequence& entry : plan.entries) {
      if (!entry.is_prefill) continue;
      const std::int32_t most = std::min(most_in_step(*entry.sequence), room_for(*entry.sequence));
      const std::int32_t left = std::min(tokens_left(plan), most - entry.count);
      if (left <= 0) continue;
      const std::int32_t more = without_cut(*entry.sequence, entry.first_token,
                                            entry.count + std::min(left, chunk_unit_), entry.count + left) -
                                entry.count;
      if (more <= 0) continue;
      grow_entry(entry, more, plan);
      any_took = true;
    }
  }
}

std::int32_t Scheduler::without_cut(const Sequence& sequence, std::int32_t first, std::int32_t count,
                                    std::int32_t most) {
  if (!sequence.joint) return count;
  const std::int32_t end = first + count;
  const auto next = std::ranges::lower_bound(*sequence.joint, end, {}, &JointTokens::begin);
  if (next == sequence.joint->begin()) return count;
  const JointTokens& last = *std::prev(next);  // begins before `end`
  if (last.end <= end) return count;
  return last.end - first <= most ? last.end - first : std::max(0, last.begin - first);
}

std::int32_t Scheduler::least_from(const Sequence& sequence, std::int32_t first) {
  return without_cut(sequence, first, 1, std::numeric_limits<std::int32_t>::max());
}

}  // namespace adaptrt
