// Plans of steps that begin before the tokens of the step before are known.

#include <algorithm>
#include <stdexcept>
#include <string>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

bool Scheduler::plan_ahead(const StepPlan& plan, StepPlan& ahead) {
  ahead.clear();
  if (!may_look_ahead(plan)) return false;
  std::int64_t num_blocks = 0;
  for (const PlannedSequence& entry : plan.entries) {
    Sequence& sequence = *entry.sequence;
    if (ends_after(entry)) continue;
    num_blocks += memory_.blocks_to_grow(sequence.memory, entry.end() + 1);
    ahead.entries.push_back(
        {.sequence = &sequence, .first_token = entry.end(), .count = 1, .wants_logits = true});
  }
  if (num_blocks > memory_.num_available()) ahead.entries.clear();
  for (const PlannedSequence& entry : ahead.entries) {
    if (!memory_.try_grow(entry.sequence->memory, entry.end())) {
      throw std::logic_error("sequence " + std::to_string(entry.sequence->id) +
                             " does not get the KV block that is available");
    }
  }
  if (ahead.empty()) return false;
  ahead.num_tokens = ahead.num_generation_sequences = static_cast<std::int32_t>(ahead.entries.size());
  ahead_ = &ahead;
  return true;
}

bool Scheduler::ends_after(const PlannedSequence& entry) {
  return entry.sequence->num_generated() + 1 >= entry.sequence->max_tokens;
}

bool Scheduler::may_look_ahead(const StepPlan& plan) const {
  if (plan.entries.size() != running_.size() || plan.awaits_loads || plan.awaits_adapter_room) return false;
  const auto waits = [](const PlannedSequence& entry) {
    return entry.is_prefill || entry.num_drafts > 0 || entry.sequence->is_beam;
  };
  if (std::ranges::any_of(plan.entries, waits)) return false;
  // A waiting sequence may start if others came or left, or will leave with this step.
  return waiting_.empty() || !(has_changed_ || std::ranges::any_of(plan.entries, ends_after));
}

void Scheduler::remove_from_ahead(const Sequence& sequence) {
  const auto planned = std::ranges::find(ahead_->entries, &sequence, &PlannedSequence::sequence);
  if (planned == ahead_->entries.end()) return;
  ahead_->entries.erase(planned);
  --ahead_->num_tokens;
  --ahead_->num_generation_sequences;
  if (sequence.lease) kept_leases_.push_back(sequence.lease);
}

}  // namespace adaptrt
