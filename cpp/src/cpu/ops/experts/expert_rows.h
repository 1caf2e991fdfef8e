#pragma once

#include <cstdint>

#include "context.h"

namespace adaptrt {

/// Chooses the experts of tokens [first, first + count) by their router logits, and fills
/// StepMemory::experts: one row for each token and each of its local experts, sorted by expert, then by
/// token, with weights and adapters.
void take_experts(const ExpertsOp& op, const CpuContext& context, const Step& step, std::int64_t first,
                  std::int64_t count);

}  // namespace adaptrt
