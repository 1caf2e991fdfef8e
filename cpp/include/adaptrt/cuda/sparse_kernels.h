#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda {

// Kernels of a ReLU-gated MLP that read only the weights of active neurons, on an NVIDIA GPU. T is the
// engine's type, float16 or bfloat16. All addresses are aligned to 16 bytes. Each function enqueues one
// launch on `stream` (a cudaStream_t), whose shape depends only on the sizes; it does nothing for 0 tokens.
// It throws ConfigError for invalid sizes and types, and StepError if CUDA rejects the launch.
//
// A neuron is active if its gate is open in any row of the step. Sums add the same inputs in the same order
// as those of ProductKernel, without groups of 16 neurons that are all zero. So results have the same bits.

/// Maximum number of rows of a step that reads only active neurons.
inline constexpr std::int64_t kMaxSparseTokens = 8;
/// Number of neurons whose activity is in one mask.
inline constexpr std::int64_t kNeuronGroup = 16;
/// Maximum number of neurons of an MLP: a block lists its groups in shared memory.
inline constexpr std::int64_t kMaxNeurons = kNeuronGroup << 13;

/// Returns the number of masks of an MLP.
[[nodiscard]] constexpr std::int64_t neuron_groups(std::int64_t neurons) {
  return (neurons + kNeuronGroup - 1) / kNeuronGroup;
}

/// A vector of T for each neuron: its row of up, or its column of down. No kernel of the stream writes them.
struct NeuronVectors {
  const std::int32_t* slots =
      nullptr;                     ///< [neurons]: index of the vector in `resident`; -1: it is in `pinned`
  const void* resident = nullptr;  ///< T [slots, size] in device memory
  const void* pinned = nullptr;    ///< T [neurons, size] in pinned host memory, which the device reads
};

/// Bit i of masks[g] is set if neuron 16 g + i is active: gate + bias is not <= threshold in some row.
struct MarkActive {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int64_t neurons = 0;     ///< a multiple of 8
  const void* gate = nullptr;   ///< T [tokens, neurons]
  const float* bias = nullptr;  ///< [neurons]; nullptr: none
  float threshold = 0.0F;
  std::uint16_t* masks = nullptr;  ///< [neuron_groups(neurons)]
};
void enqueue(const MarkActive& work, void* stream);

/// y[token, neuron] = round(sum over in of x[token, in] * up[neuron, in]) for active neurons. Other elements
/// of y are written, but have no meaning.
struct SparseUp {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;   ///< up to kMaxSparseTokens
  std::int64_t in_size = 0;  ///< a multiple of 8
  std::int64_t neurons = 0;  ///< a multiple of 8
  const void* x = nullptr;   ///< T [tokens, in]
  const std::uint16_t* masks = nullptr;
  NeuronVectors rows = {};
  void* y = nullptr;  ///< T [tokens, neurons]
};
void enqueue(const SparseUp& work, void* stream);

/// y[token, out] = round(sum over active neurons of x[token, neuron] * down[out, neuron]). x is 0 for neurons
/// that are not active.
struct SparseDown {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;    ///< up to kMaxSparseTokens
  std::int64_t neurons = 0;   ///< a multiple of 8
  std::int64_t out_size = 0;  ///< a multiple of 8
  const void* x = nullptr;    ///< T [tokens, neurons]
  const std::uint16_t* masks = nullptr;
  NeuronVectors columns = {};
  void* y = nullptr;  ///< T [tokens, out]
};
void enqueue(const SparseDown& work, void* stream);

}  // namespace adaptrt::cuda
