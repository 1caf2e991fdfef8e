#pragma once

#include <cstdint>

#include "adaptrt/core/best_token.h"
#include "adaptrt/core/dtype.h"
#include "adaptrt/core/highest_logits.h"
#include "adaptrt/program/ops.h"
#include "adaptrt/program/xielu.h"

namespace adaptrt::cuda {

// Kernels of a network's ops that compute each row by itself, on an NVIDIA GPU. T is the engine's type,
// float16 or bfloat16. All addresses are device addresses, aligned to 16 bytes. Each function enqueues one
// launch on `stream` (a cudaStream_t), whose shape depends only on the sizes; it does nothing for 0 rows. It
// throws ConfigError for invalid sizes and types, and StepError if CUDA rejects the launch. The order of
// every sum depends only on the width, so a row's bits do not depend on the other rows.

/// output[row] = table[token_ids[row]] * scale + positions[position_ids[row]]. Rows of tokens that the table
/// does not have stay as they are; see AdaptedEmbedding.
struct Embedding {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int64_t width = 0;                   ///< a multiple of 8
  std::int64_t vocabulary = 0;              ///< rows of the table
  const void* table = nullptr;              ///< T [vocabulary, width]
  const std::int32_t* token_ids = nullptr;  ///< [tokens]
  float scale = 1.0F;
  const void* positions = nullptr;             ///< T [positions, width]; nullptr: none
  const std::int32_t* position_ids = nullptr;  ///< [tokens]
  float* output = nullptr;                     ///< [tokens, width]
};
void enqueue(const Embedding& work, void* stream);

/// stream += addend; then output[i] = round(s / sqrt(mean(s^2) + epsilon) * weight) for each row s of stream.
/// With `row_ids`, output row i comes from row row_ids[i], and stream does not change.
struct RmsNorm {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;                  ///< rows of the output
  std::int64_t width = 0;                 ///< a multiple of 8
  float* stream = nullptr;                ///< [tokens, width], the residual stream
  const void* addend = nullptr;           ///< T [tokens, width]; nullptr: nothing is added
  const std::int32_t* row_ids = nullptr;  ///< [rows]; nullptr: all tokens
  const float* weight = nullptr;          ///< [width]
  float epsilon = 0.0F;
  void* output = nullptr;       ///< T or float32 [rows, width]
  bool float32_output = false;  ///< true: the output is float32, not rounded
};
void enqueue(const RmsNorm& work, void* stream);

/// output[i] = round((s - mean(s)) / sqrt(variance(s) + epsilon) * weight + bias), otherwise as RmsNorm. The
/// shift of the row's adapter is added to the bias.
struct LayerNorm {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;                  ///< rows of the output
  std::int64_t width = 0;                 ///< a multiple of 8
  float* stream = nullptr;                ///< [tokens, width], the residual stream
  const void* addend = nullptr;           ///< T [tokens, width]; nullptr: nothing is added
  const std::int32_t* row_ids = nullptr;  ///< [rows]; nullptr: all tokens
  const float* weight = nullptr;          ///< [width]
  const float* bias = nullptr;            ///< [width]; nullptr: none
  /// [rows]: -1 is the base model; nullptr: no row has an adapter. With a bias only.
  const std::int32_t* adapter_slots = nullptr;
  const std::int64_t* shifts = nullptr;  ///< [slots, slot_entries]: address of float32[width], or 0
  std::int64_t slot_entries = 0;
  std::int64_t entry = 0;  ///< of the norm, among a slot's entries
  float epsilon = 0.0F;
  void* output = nullptr;       ///< T or float32 [rows, width]; float32 may be `stream` without row_ids
  bool float32_output = false;  ///< true: the output is float32, not rounded
};
void enqueue(const LayerNorm& work, void* stream);

/// stream += x / sqrt(mean(x^2) + epsilon) * weight for each row x of `input`: a norm after a sublayer. The
/// sum is then multiplied by sum_scale.
struct AddedNorm {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t width = 0;         ///< a multiple of 8
  const void* input = nullptr;    ///< T or float32 [rows, width]
  bool float32_input = false;     ///< true: the input is float32
  const float* weight = nullptr;  ///< [width]
  float epsilon = 0.0F;
  const float* sum_scale = nullptr;  ///< [1]; nullptr: 1
  float* stream = nullptr;           ///< [rows, width]
};
void enqueue(const AddedNorm& work, void* stream);

/// Columns of HeadNorms: `count` groups of `size` neighbouring columns. Each group has its own mean.
struct NormGroups {
  std::int64_t first = 0;         ///< first column, a multiple of 8
  std::int64_t count = 0;         ///< 0: no columns
  std::int64_t size = 0;          ///< a multiple of 8
  const float* weight = nullptr;  ///< [size], of every group
};

/// x = round(x / sqrt(mean(x^2) + epsilon) * weight) in place, for groups of columns of each row: the heads
/// of q, k and v, or all heads of q and all heads of k.
struct HeadNorms {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int64_t stride = 0;  ///< width of a row, a multiple of 8
  NormGroups queries;
  NormGroups keys;
  NormGroups values = {};  ///< never rotated
  float epsilon = 0.0F;
  void* qkv = nullptr;  ///< T [tokens, stride]
  /// T [tokens, stride]: its first columns become the values, if those are the keys before their norm:
  /// values.weight is their norm's weight, and `values` has no columns. nullptr: values are columns of qkv.
  void* values_from_keys = nullptr;
  /// A multiple of 8: element i of a group is first rotated together with element i + rotary_half, in
  /// float32. Groups have up to 256 elements then. 0: groups are not rotated.
  std::int64_t rotary_half = 0;
  bool interleaved = false;       ///< elements 2 i and 2 i + 1 rotate together instead
  const float* cosine = nullptr;  ///< [tokens, rotary_half]
  const float* sine = nullptr;    ///< [tokens, rotary_half]
};
void enqueue(const HeadNorms& work, void* stream);

/// output = input, rounded to T.
struct Cast {
  DType dtype = DType::kBFloat16;
  std::int64_t elements = 0;     ///< a multiple of 8
  const float* input = nullptr;  ///< [elements]
  void* output = nullptr;        ///< T [elements]
};
void enqueue(const Cast& work, void* stream);

/// stream += addend.
struct Addition {
  DType dtype = DType::kBFloat16;
  std::int64_t elements = 0;  ///< a multiple of 8
  float* stream = nullptr;
  const void* addend = nullptr;  ///< T
};
void enqueue(const Addition& work, void* stream);

/// output = activation(gate) * the columns [first_column, first_column + width) of values.
struct GatedColumns {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int64_t width = 0;                                    ///< a multiple of 8
  std::int64_t stride = 0;                                   ///< columns of `values`, a multiple of 8
  std::int64_t first_column = 0;                             ///< a multiple of 8
  LinearEpilogue activation = LinearEpilogue::kGeluTanhMul;  ///< kSiluMul, kGeluMul or kGeluTanhMul
  const void* gate = nullptr;                                ///< T [tokens, width]
  const float* values = nullptr;                             ///< [tokens, stride]
  void* output = nullptr;                                    ///< T [tokens, width]
};
void enqueue(const GatedColumns& work, void* stream);

/// stream[row] += sigmoid(gate[row]) * input[row].
struct GatedAdd {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int64_t width = 0;       ///< a multiple of 8
  const void* input = nullptr;  ///< T [tokens, width]
  const float* gate = nullptr;  ///< [tokens]
  float* stream = nullptr;      ///< [tokens, width]
};
void enqueue(const GatedAdd& work, void* stream);

/// cosine and sine of a step's rotary angles: see RopeTableOp, whose fields these are.
struct RopeTable {
  std::int64_t tokens = 0;
  std::int64_t half = 0;  ///< angles of a token
  RopeKind kind = RopeKind::kStatic;
  float attention_scaling = 1.0F;
  float base = 10000.0F;
  float factor = 1.0F;
  std::int32_t original_max_position = 0;
  const float* inverse_frequencies = nullptr;       ///< [half]
  const float* long_inverse_frequencies = nullptr;  ///< [half], for RopeKind::kLong
  const std::int32_t* positions = nullptr;          ///< [tokens]
  std::int64_t sequences = 0;
  const std::int32_t* sequence_offsets = nullptr;  ///< [sequences + 1]; read unless kind is kStatic
  const std::int32_t* prompt_lengths = nullptr;    ///< [sequences]; read unless kind is kStatic
  float* cosine = nullptr;                         ///< [tokens, half]
  float* sine = nullptr;                           ///< [tokens, half]
};
void enqueue(const RopeTable& work, void* stream);

/// Finishes a linear layer's output y, in float32, and rounds once: y = (product + bias) * scale, then the
/// soft cap, then the epilogue. With a gate, product is [tokens, 2 width]: [gated | linear], and linear is
/// not multiplied by scale. If `linear` is given, product has only the first of them.
struct Finish {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int64_t width = 0;         ///< of the output, a multiple of 8
  const void* product = nullptr;  ///< T [tokens, width] or [tokens, 2 width]
  const void* linear = nullptr;   ///< T [tokens, width], with a gate; nullptr: product has it
  const float* bias = nullptr;    ///< [width], with a gate [2 width]; nullptr: none
  /// [tokens]: row of `bias` of each row; nullptr: `bias` is one row.
  const std::int32_t* bias_rows = nullptr;
  float scale = 1.0F;
  float softcap = 0.0F;                              ///< 0: none
  LinearEpilogue epilogue = LinearEpilogue::kStore;  ///< not kAdd
  float threshold = 0.0F;                            ///< of ReLU gates
  void* output = nullptr;                            ///< T [tokens, width]; may be `product` without a gate
};
void enqueue(const Finish& work, void* stream);

/// output = xIELU(input), see XieluOp, with a = `positive` and n = `negative`.
struct Xielu {
  DType dtype = DType::kBFloat16;
  std::int64_t elements = 0;  ///< a multiple of 8
  XieluCoefficients coefficients;
  const void* input = nullptr;  ///< T [elements]
  void* output = nullptr;       ///< T [elements]
};
void enqueue(const Xielu& work, void* stream);

/// logits = softcap * tanh((logits + bias) * scale / softcap), in place.
struct FinishLogits {
  std::int64_t elements = 0;
  float* logits = nullptr;
  float scale = 1.0F;
  float softcap = 0.0F;         ///< 0: none
  const float* bias = nullptr;  ///< [width]; nullptr: none
  std::int64_t width = 0;       ///< of a row; read with a bias, and then a multiple of 8
};
void enqueue(const FinishLogits& work, void* stream);

/// The same for rows of other widths: the first `width` logits of a row come from the first of input[row].
struct FinishPaddedLogits {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::int64_t stride = 0;         ///< distance of rows of `input`, at least `width`
  std::int64_t logits_stride = 0;  ///< distance of rows of `logits`, at least `width`
  const float* input = nullptr;    ///< [rows, stride]
  float* logits = nullptr;         ///< [rows, logits_stride]
  float scale = 1.0F;
  float softcap = 0.0F;         ///< 0: none
  const float* bias = nullptr;  ///< [width]; nullptr: none
};
void enqueue(const FinishPaddedLogits& work, void* stream);

/// tokens[i] = the index of the largest value in row i, the smallest of equal ones; kUnusableLogits if a
/// value is NaN or +infinity; kEveryTokenForbidden if all are -infinity.
struct BestTokens {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::int64_t stride = 0;         ///< from row to row
  const float* logits = nullptr;   ///< [rows, stride]
  std::int32_t* tokens = nullptr;  ///< [rows]
};
void enqueue(const BestTokens& work, void* stream);

/// A token id of -1 - r becomes best_tokens[r], or 0 if that is negative. Other ids stay as they are.
struct TakeTokens {
  std::int64_t tokens = 0;
  const std::int32_t* best_tokens = nullptr;  ///< of the rows of an earlier run
  std::int32_t* token_ids = nullptr;          ///< [tokens]
};
void enqueue(const TakeTokens& work, void* stream);

/// The highest logits of each row, in their order, and the row's summary. A row with a NaN or +infinity, or
/// only -infinity, has only a summary.
struct FindHighest {
  std::int64_t rows = 0;
  std::int64_t width = 0;           ///< at most 2^30
  std::int64_t stride = 0;          ///< from row to row
  std::int64_t count = 0;           ///< logits to find, at most the width and kMaxHighestLogits
  const float* logits = nullptr;    ///< [rows, stride]
  RowSummary* summaries = nullptr;  ///< [rows]
  TokenLogit* highest = nullptr;    ///< [rows, count]
};
void enqueue(const FindHighest& work, void* stream);

}  // namespace adaptrt::cuda
