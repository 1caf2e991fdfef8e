#pragma once

#include <memory>

#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"
#include "lowering.h"

namespace adaptrt {

/// Makes an op that numbers the slots of all later ops of latent attention with so many heads.
[[nodiscard]] std::unique_ptr<const CudaOp> make_head_numbers(const LatentShape& shape,
                                                              const CudaMemory& memory);

[[nodiscard]] std::unique_ptr<const CudaOp> make_latent_queries(const LatentQueriesOp& op,
                                                                const Program& program,
                                                                const CudaMemory& memory,
                                                                DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_latent_values(const LatentValuesOp& op,
                                                               const Program& program,
                                                               const CudaMemory& memory,
                                                               DeviceWeights& weights);

/// Makes an attention op whose values are keys.
[[nodiscard]] std::unique_ptr<const CudaOp> make_latent_attention(const AttentionOp& op,
                                                                  const Program& program,
                                                                  const CudaMemory& memory,
                                                                  const KvPoolAddresses& pools);

}  // namespace adaptrt
