// Drafts in the step loop.

#include <algorithm>

#include "step_loop.h"

namespace adaptrt {

void StepLoop::draft_with_engine() {
  if (draft_target_ == nullptr) return;
  const auto begin = Clock::now();
  draft_target_->draft(scheduler_.running(), scheduler_.limits().max_rows_with_drafts);
  draft_engine_latency_ = Clock::now() - begin;
}

void StepLoop::release_drafts_of(Sequence& sequence) {
  if (draft_target_ != nullptr) draft_target_->release(sequence);
}

void StepLoop::make_drafts() {
  draft_latency_ = {};
  const auto has_drafter = [](const PlannedSequence& entry) {
    return static_cast<const ActiveSequence*>(entry.sequence)->has_drafter();
  };
  if (std::ranges::none_of(plan_.entries, has_drafter)) return;
  if (statistics_.wants_iterations()) {
    describe_drafts(plan_, iteration_stats_);
    if (const auto& step = iteration_stats_.spec_decoding_stats) {
      speculation_stats_.draft_tokens += step->num_draft_tokens;
      speculation_stats_.accepted_tokens += step->num_accepted_tokens;
    }
  }
  const auto begin = Clock::now();
  for (const auto& entry : plan_.entries) {
    if (!entry.wants_logits || !has_drafter(entry)) continue;
    static_cast<ActiveSequence*>(entry.sequence)
        ->make_drafts(entry.num_drafts, entry.num_right_drafts(), num_gained_by_drafts(entry));
  }
  draft_latency_ = Clock::now() - begin;
}

}  // namespace adaptrt
