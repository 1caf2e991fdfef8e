#pragma once

#include <cstddef>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/ops.h"
#include "step.h"

namespace adaptrt {

/// Adds what an op of the body, which has just run, used of what it chooses from.
void count_usage(std::size_t index, const Op& op, const Step& step, WeightUsage* usage);

}  // namespace adaptrt
