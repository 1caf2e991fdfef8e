#pragma once

#include <memory>

#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"

namespace adaptrt {

/// Makes the experts of a layer: the choice of each token's experts, their products, and the weighted sum.
[[nodiscard]] std::unique_ptr<const CudaOp> make_experts(const ExpertsOp& op, const Program& program,
                                                         const CudaMemory& memory, DeviceWeights& weights);

}  // namespace adaptrt
