#pragma once

#include <cstdint>

#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Chooses one token's experts. Writes op.routing.top_k numbers, ascending, to `chosen` and their weights to
/// `weights`, whatever the logits [num_experts] are. `scratch` has routing_scratch_floats().
void route_token(const ExpertsOp& op, const KernelTable& kernels, const float* logits, float* scratch,
                 std::int32_t* chosen, float* weights);

[[nodiscard]] std::int64_t routing_scratch_floats(const ExpertsOp& op);

}  // namespace adaptrt
