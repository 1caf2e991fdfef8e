#pragma once

#include <cstddef>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/ops.h"
#include "context.h"

namespace adaptrt {

/// Adds what an op of the body, which has just run over `rows` rows, used of what it chooses from.
void count_usage(std::size_t index, const Op& op, const CpuContext& context, std::int64_t rows,
                 WeightUsage* usage);

}  // namespace adaptrt
