#pragma once

#include <cstdint>

#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Returns the rank with the results, in an engine of several stages.
[[nodiscard]] inline std::int32_t first_rank_of_last_stage(const Communicator& communicator,
                                                           std::int32_t num_stages) {
  return communicator.size() - communicator.size() / num_stages;
}

[[nodiscard]] inline bool is_last_stage(const Communicator& communicator, std::int32_t num_stages) {
  return communicator.rank() >= first_rank_of_last_stage(communicator, num_stages);
}

[[nodiscard]] inline bool is_first_stage(const Communicator& communicator, std::int32_t num_stages) {
  return communicator.rank() < communicator.size() / num_stages;
}

/// Returns the step for stages after the first, which look up no embeddings.
[[nodiscard]] inline StepInput without_types(StepInput step) {
  step.token_types = {};
  return step;
}

/// Returns the step for stages whose layers keep no states.
[[nodiscard]] inline StepInput without_states(StepInput step) {
  step.state_slots = {};
  step.state_copies_from = {};
  step.state_copies_to = {};
  return step;
}

/// Returns the step for stages before the last.
[[nodiscard]] inline StepInput without_results(StepInput step) {
  step.logit_rows = {};
  step.hidden_rows = {};
  return step;
}

}  // namespace adaptrt
