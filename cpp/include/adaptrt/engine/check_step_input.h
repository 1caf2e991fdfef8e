#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Checks an engine's steps, one after the other. After the first step, valid steps allocate nothing.
class StepInputChecker {
 public:
  /// Checks the input of one step; every engine calls it first. Throws StepError with all violations of
  /// StepInput's rules.
  void check(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks);

 private:
  std::uint64_t step_ = 0;
  /// The newest step that writes each KV block.
  std::vector<std::uint64_t> newest_writes_;
};

/// Checks the members of StepInput for engines with an encoder, whose pool has `num_blocks` blocks. Throws
/// StepError. Allocates memory only in steps with encoder inputs.
void check_encoder_inputs(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks);

}  // namespace adaptrt
