#pragma once

#include <cstddef>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/ops.h"
#include "context.h"

namespace adaptrt {

/// Counts the neurons or experts that an op of the body used, after it ran over `rows` rows.
void count_usage(std::size_t index, const Op& op, const CpuContext& context, std::int64_t rows,
                 WeightUsage* usage);

}  // namespace adaptrt
