#pragma once

#include <memory>

#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"

namespace adaptrt {

[[nodiscard]] std::unique_ptr<const CudaOp> make_embedding(const EmbeddingOp& op, const Program& program,
                                                           const CudaMemory& memory, DeviceWeights& weights);

/// Makes an op that applies adapters to the embedding; nullptr if no adapter changes it.
[[nodiscard]] std::unique_ptr<const CudaOp> make_adapted_embedding(const EmbeddingOp& op,
                                                                   const Program& program,
                                                                   const CudaMemory& memory,
                                                                   DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_rope_table(const RopeTableOp& op, const CudaMemory& memory,
                                                            DeviceWeights& weights);

/// Makes a norm. `adds`: it first adds memory.addend() to its input. `is_head`: its rows are logit rows.
[[nodiscard]] std::unique_ptr<const CudaOp> make_rms_norm(const RmsNormOp& op, const Program& program,
                                                          bool is_head, bool adds, const CudaMemory& memory,
                                                          DeviceWeights& weights);

/// Makes a norm of a sublayer's output, which is added to a residual stream.
[[nodiscard]] std::unique_ptr<const CudaOp> make_added_norm(const RmsNormOp& op, const Program& program,
                                                            const CudaMemory& memory, DeviceWeights& weights);

/// See make_rms_norm.
[[nodiscard]] std::unique_ptr<const CudaOp> make_layer_norm(const LayerNormOp& op, const Program& program,
                                                            bool is_head, bool adds, const CudaMemory& memory,
                                                            DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_cast(const CastOp& op, const Program& program, bool is_head,
                                                      const CudaMemory& memory);

[[nodiscard]] std::unique_ptr<const CudaOp> make_xielu(const XieluOp& op, const Program& program,
                                                       const CudaMemory& memory);

/// Makes an op that adds memory.addend() to a residual stream.
[[nodiscard]] std::unique_ptr<const CudaOp> make_addition(BufferId stream, const Program& program,
                                                          const CudaMemory& memory);

[[nodiscard]] std::unique_ptr<const CudaOp> make_gated_add(const GatedAddOp& op, const Program& program,
                                                           const CudaMemory& memory);

[[nodiscard]] std::unique_ptr<const CudaOp> make_gated_columns(const GatedColumnsOp& op,
                                                               const Program& program,
                                                               const CudaMemory& memory);

/// Makes an op that finds the best token of each row of logits.
[[nodiscard]] std::unique_ptr<const CudaOp> make_best_tokens(const Program& program, const CudaMemory& memory,
                                                             std::int32_t* best_tokens);

}  // namespace adaptrt
