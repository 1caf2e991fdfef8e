// Planning of drafts.

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

std::int32_t PlannedSequence::num_right_drafts() const {
  std::int32_t num_right = 0;
  while (num_right < num_drafts && end() + num_right + 1 < sequence->num_tokens() &&
         sequence->tokens[end() + num_right] == sequence->drafts[num_right]) {
    ++num_right;
  }
  return num_right;
}

void Scheduler::plan_drafts(StepPlan& plan) {
  const auto has_drafts = [](const PlannedSequence& entry) { return !entry.sequence->drafts.empty(); };
  // If a sequence was preempted, nothing is left for drafts.
  if (!plan.preempted.empty() || std::ranges::none_of(plan.entries, has_drafts)) return;
  std::int32_t left = std::min(tokens_left(plan),
                               limits_.max_rows_with_drafts - static_cast<std::int32_t>(plan.entries.size()));
  std::int64_t spare_blocks = num_spare_blocks();
  for (bool any_took = true; any_took && left > 0;) {
    any_took = false;
    for (PlannedSequence& entry : plan.entries) {
      if (left == 0) break;
      if (!add_draft(entry, spare_blocks)) continue;
      --left;
      ++plan.num_tokens;
      ++plan.num_draft_tokens;
      any_took = true;
    }
  }
}

std::int64_t Scheduler::num_spare_blocks() const {
  // Draft blocks belong to the blocks promised to the sequence.
  if (!may_preempt()) return std::numeric_limits<std::int64_t>::max();
  if (!waiting_.empty()) return 0;
  return memory_.num_available() - num_promised_blocks() - static_cast<std::int64_t>(running_.size());
}

bool Scheduler::add_draft(PlannedSequence& entry, std::int64_t& num_spare_blocks) {
  Sequence& sequence = *entry.sequence;
  // The last token that it may generate is never computed, and forks copy the prompt's blocks only.
  const std::int32_t most = std::min(sequence.max_tokens - sequence.num_generated() - 1,
                                     static_cast<std::int32_t>(sequence.drafts.size()));
  if (!entry.wants_logits || sequence.num_forks > 0 || entry.num_drafts >= most) return false;
  // A wrong draft takes all tokens of the step back, if there are states.
  if (memory_.has_states() && entry.is_prefill) return false;
  const std::int32_t num_tokens = entry.end() + entry.num_drafts + 1;
  const bool needs_block = memory_.blocks_to_grow(sequence.memory, num_tokens) > 0;
  if (needs_block && num_spare_blocks <= 0) return false;
  if (!memory_.try_save_states(sequence.memory)) return false;
  if (needs_block) {
    --num_spare_blocks;
    if (!memory_.try_grow(sequence.memory, num_tokens)) {
      throw std::logic_error("sequence " + std::to_string(sequence.id) +
                             " does not get the KV block promised to it");
    }
  }
  ++entry.num_drafts;
  return true;
}

}  // namespace adaptrt
