#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "adaptrt/program/ops.h"

namespace adaptrt::cuda {

// Kernels of linear attention on an NVIDIA GPU: ops that advance the states of sequences, token by token in
// the order of positions, and gates. T is the engine's type, float16 or bfloat16. All addresses are device
// addresses, aligned to 16 bytes. Each function enqueues one launch on `stream` (a cudaStream_t), whose shape
// depends only on the sizes; it does nothing without rows. It throws ConfigError for invalid sizes and types,
// and StepError if CUDA rejects the launch. The order of every sum depends only on the sizes of the op, so
// bits depend neither on the steps into which a prompt is cut nor on other sequences.

/// Most taps of a convolution.
inline constexpr std::int64_t kMaxTaps = 4;
/// Most rows of the state of a head: key_dim, or state_dim.
inline constexpr std::int64_t kMaxStateRows = 256;

/// The sequences of a run, and the states of one layer, which are in slots.
struct SequenceStates {
  std::int64_t sequences = 0;
  const std::int32_t* sequence_offsets = nullptr;  ///< [sequences + 1], first row of each
  const std::int32_t* slots = nullptr;  ///< [sequences]; below 0: a state of zeros, which is not kept
  float* states = nullptr;              ///< the layer's state in slot 0
  std::int64_t slot_stride = 0;         ///< floats from slot to slot
  bool advances = true;                 ///< false: states stay as they were
};

/// See CausalConvolutionOp.
struct CausalConvolution {
  SequenceStates states;  ///< [taps - 1, width]
  std::int64_t width = 0;
  std::int64_t stride = 0;  ///< of a row of values
  std::int64_t taps = 0;
  const float* weight = nullptr;  ///< [taps, width]
  const float* bias = nullptr;    ///< [width]; nullptr: none
  float* values = nullptr;        ///< [rows, stride]; the first `width` columns change
};
void enqueue(const CausalConvolution& work, void* stream);

/// See GatedConvolutionOp.
struct GatedConvolution {
  DType dtype = DType::kBFloat16;
  SequenceStates states;  ///< [taps - 1, width]
  std::int64_t width = 0;
  std::int64_t taps = 0;
  const float* weight = nullptr;  ///< [taps, width]
  const float* bias = nullptr;    ///< [width]; nullptr: none
  const float* input = nullptr;   ///< [rows, 3 width]
  void* output = nullptr;         ///< T [rows, width]
};
void enqueue(const GatedConvolution& work, void* stream);

/// See GatedDeltaOp. Nothing but the output and the states changes.
struct GatedDelta {
  SequenceStates states;  ///< [value heads, key_dim, value_dim]
  DeltaShape shape;
  std::int64_t stride = 0;           ///< of a row of qkv
  const float* qkv = nullptr;        ///< [rows, stride]: [q | k | v], and more
  const float* gates = nullptr;      ///< [rows, 2 value heads]: [b | a]
  const float* log_decay = nullptr;  ///< [value heads]
  const float* time_bias = nullptr;  ///< [value heads]
  float update_scale = 1.0F;
  float* output = nullptr;  ///< [rows, value_size]
};
void enqueue(const GatedDelta& work, void* stream);

/// See SelectiveScanOp. Nothing but the output and the states changes.
struct SelectiveScan {
  SequenceStates states;  ///< [heads, state_dim, head_dim]
  ScanShape shape;
  std::int64_t stride = 0;           ///< of a row of values
  const float* values = nullptr;     ///< [rows, stride]: [x | B | C | dt], and more
  const float* log_decay = nullptr;  ///< [heads]
  const float* time_bias = nullptr;  ///< [heads]
  const float* skip = nullptr;       ///< [heads]
  float time_min = 0.0F;
  float time_max = 0.0F;
  float* output = nullptr;  ///< [rows, value_size]
};
void enqueue(const SelectiveScan& work, void* stream);

/// See GatedRmsNormOp.
struct GatedRmsNorm {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::int64_t group = 0;         ///< elements of a group
  std::int64_t weight_size = 0;   ///< a multiple of `group`
  std::int64_t gate_stride = 0;   ///< of a row of gate
  const float* input = nullptr;   ///< [rows, width]
  const float* gate = nullptr;    ///< [rows, gate_stride], of which the last `width` columns count
  const float* weight = nullptr;  ///< [weight_size]
  float epsilon = 0.0F;
  bool gate_first = false;
  void* output = nullptr;  ///< T [rows, width]
};
void enqueue(const GatedRmsNorm& work, void* stream);

/// See SigmoidGateOp.
struct SigmoidGate {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t width = 0;        ///< a multiple of 8
  std::int64_t gate_stride = 0;  ///< of a row of gate, a multiple of 8
  const void* gate = nullptr;    ///< T [rows, gate_stride], of which the last `width` columns count
  void* output = nullptr;        ///< T [rows, width]
};
void enqueue(const SigmoidGate& work, void* stream);

}  // namespace adaptrt::cuda
