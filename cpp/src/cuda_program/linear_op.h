#pragma once

#include <memory>

#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"

namespace adaptrt {

/// Makes a linear layer: the product, then its adapters, then bias, scale, soft cap and activation.
/// `is_head`: its rows are logit rows.
[[nodiscard]] std::unique_ptr<const CudaOp> make_linear(const LinearOp& op, const Program& program,
                                                        bool is_head, const CudaMemory& memory,
                                                        DeviceWeights& weights);

}  // namespace adaptrt
