#pragma once

#include <cstdint>

#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// What every engine does first. Throws StepError, naming all that breaks StepInput's rules.
void check_step_input(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks);

}  // namespace adaptrt
