#include "look_ahead.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// True if the engine finds the next token of the sequence, and nothing is made of it before the next step.
bool goes_on_without_host(const PlannedSequence& entry) {
  const auto* sequence = static_cast<const ActiveSequence*>(entry.sequence);
  return sequence->is_token_found_by_engine() && !sequence->has_drafter();
}

}  // namespace

void LookAhead::begin(const StepPlan& plan, const StepBuilder& step) {
  if (!is_possible_ || !step.logit_rows().empty() ||
      !std::ranges::all_of(plan.entries, goes_on_without_host) || !scheduler_.plan_ahead(plan, plan_)) {
    return;
  }
  previous_rows_.clear();
  // `step` may have rows of sequences that have left its plan; the order is the same.
  const std::span<const Sequence* const> sequences = step.sequences();
  auto row = sequences.begin();
  for (const PlannedSequence& entry : plan_.entries) {
    row = std::find(row, sequences.end(), entry.sequence);
    previous_rows_.push_back(static_cast<std::int32_t>(row - sequences.begin()));
  }
  try {
    engine_.begin_ahead(step_.build(plan_), previous_rows_);
    is_begun_ = true;
  } catch (const EngineError&) {
    throw;  // the engine is unusable
  } catch (const std::exception&) {
    // The next step fails too if the reason stays.
    scheduler_.end_ahead();
    plan_.clear();
  }
}

bool LookAhead::take(StepPlan& plan, StepBuilder& step) {
  discard_if_unused();
  if (!std::exchange(is_begun_, false)) return false;
  scheduler_.end_ahead();
  std::swap(plan, plan_);
  std::swap(step, step_);
  step.keep_only(plan);
  plan_.clear();
  return true;
}

void LookAhead::discard() {
  if (!std::exchange(is_begun_, false)) return;
  scheduler_.end_ahead();
  plan_.clear();
  try {
    engine_.await_step([](auto...) {}, [](auto...) {});
  } catch (const EngineError&) {
    throw;                           // the engine is unusable
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no request needs the step
  }
  scheduler_.release_kept_leases();
}

}  // namespace adaptrt
