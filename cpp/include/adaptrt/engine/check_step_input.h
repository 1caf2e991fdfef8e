#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Checks an engine's steps, one after the other. After the first step, valid steps allocate nothing.
class StepInputChecker {
 public:
  /// Checks the input of one step; every engine calls it first. `num_state_slots` is the argument of
  /// Engine::allocate_states(), 0 before it was called. Throws StepError with all violations of StepInput's
  /// rules.
  void check(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks,
             std::int32_t num_state_slots = 0);

 private:
  std::uint64_t step_ = 0;
  /// The newest step that writes each KV block.
  std::vector<std::uint64_t> newest_writes_;
  /// The newest step in which each state slot is a sequence's.
  std::vector<std::uint64_t> newest_holders_;
};

/// Checks the members of StepInput for engines with an encoder, whose pool has `num_blocks` blocks. Throws
/// StepError. Allocates memory only in steps with encoder inputs.
void check_encoder_inputs(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks);

}  // namespace adaptrt
