#pragma once

#include <memory>

#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"
#include "lowering.h"

namespace adaptrt {

/// Makes an attention op: norms of queries and keys, RoPE, the write of keys and values to the layer's pool,
/// and attention. `hopper_prefill`: see PagedAttentionConfig.
[[nodiscard]] std::unique_ptr<const CudaOp> make_attention(const AttentionOp& op, const Program& program,
                                                           const CudaMemory& memory,
                                                           const KvPoolAddresses& pools,
                                                           DeviceWeights& weights, bool hopper_prefill);

}  // namespace adaptrt
