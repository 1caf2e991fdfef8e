#pragma once

#include <cstdint>

#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Of an engine of several stages: the rank that has what steps result in.
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

/// A step as stages behind the first one run it, which look no tokens up.
[[nodiscard]] inline StepInput without_types(StepInput step) {
  step.token_types = {};
  return step;
}

/// A step as stages that are not the last one run it.
[[nodiscard]] inline StepInput without_results(StepInput step) {
  step.logit_rows = {};
  step.hidden_rows = {};
  return step;
}

}  // namespace adaptrt
