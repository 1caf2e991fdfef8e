#pragma once

#include <cstddef>
#include <vector>

#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"
#include "state_ops.h"

namespace adaptrt {

/// KV pool of each layer: see KvPools. Filled before the first run.
using KvPoolAddresses = std::vector<std::byte*>;

/// The ops of a program, in order of execution.
struct LoweredProgram {
  CudaOps ops;
  /// The last load_position() of adapters' sites that each op reads; -1 if it reads none.
  std::vector<std::int32_t> read_positions;
  /// First op of each section, and the end of the last one.
  std::vector<std::size_t> sections;
  /// MLPs for which DeviceWeights::neurons() has places, which are one op each.
  std::vector<std::size_t> sparse_mlps;
};

/// Makes the ops of a program, in order of execution, and copies their weights to the device. `memory`,
/// `pools` and `states` must outlive the ops. `hopper_prefill`: see PagedAttentionConfig.
///
/// The output of a linear layer that is added to a residual stream is kept in memory.addend() until the next
/// op that reads the stream, or the next such layer. A norm adds it itself, which saves one pass over the
/// stream.
///
/// A ReLU-gated MLP with a sparse input becomes one op if `weights` has places for its neurons.
///
/// A section begins with each attention and each convolution of the body, and the last one ends with the
/// body. The weights of other ops belong to no section.
[[nodiscard]] LoweredProgram lower(const Program& program, const CudaMemory& memory,
                                   const KvPoolAddresses& pools, const DeviceStates& states,
                                   DeviceWeights& weights, bool hopper_prefill);

}  // namespace adaptrt
