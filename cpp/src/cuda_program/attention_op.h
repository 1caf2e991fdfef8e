#pragma once

#include <memory>

#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "lowering.h"

namespace adaptrt {

/// Makes an attention op: RoPE, the write of keys and values to the layer's pool, and attention.
[[nodiscard]] std::unique_ptr<const CudaOp> make_attention(const AttentionOp& op, const Program& program,
                                                           const CudaMemory& memory,
                                                           const KvPoolAddresses& pools);

}  // namespace adaptrt
