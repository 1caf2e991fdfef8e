#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Checks an engine's steps, one after the other. A sound step costs no memory but that of the first.
class StepInputChecker {
 public:
  /// What every engine does first. Throws StepError, naming all that breaks StepInput's rules.
  void check(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks);

 private:
  std::uint64_t step_ = 0;
  /// By KV block: the newest step that writes it.
  std::vector<std::uint64_t> newest_writes_;
};

/// The same of what StepInput has for engines with an encoder, whose pool has `num_blocks`; allocates memory
/// only in steps with encoder inputs.
void check_encoder_inputs(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks);

}  // namespace adaptrt
