#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/kernels/attention_tile.h"

namespace adaptrt {

/// Memory that will be read soon.
struct MemorySpan {
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

/// Inputs [begin, end) of a product.
struct InputRange {
  std::int64_t begin;
  std::int64_t end;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T, or += when `accumulate`.
///
/// Each element is summed over the whole of k in an order that depends on k, width and the table of kernels
/// alone, so it has the same bits whatever the other rows are, and however k was cut into parts. With
/// `accumulate` the sum is added to what was there or goes on from it, one way for each table and type.
struct PanelGemm {
  /// float32, or bfloat16 for bfloat16 panels.
  const void* a = nullptr;
  std::int64_t a_stride = 0;  ///< elements between rows
  /// What KernelTable::pack_rows made of the rows, where it was called: the first one's first step, and the
  /// bytes between steps. Where it is there, gemm, compressed_gemm and coded_gemm do not read `a`.
  const std::byte* a_steps = nullptr;
  std::int64_t a_step_bytes = 0;
  /// One panel of a PanelMatrix: [ceil(k / ki)][width][ki].
  const std::byte* panel = nullptr;
  std::int64_t k = 0;
  std::int64_t width = 0;  ///< 1 to kPanelColumns
  float* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;
  /// Of panels that are in the cache already.
  bool accumulate = false;
  /// Of tables with part_bytes: the inputs that are multiplied now. The parts of a panel are taken in order;
  /// before the last one `out` holds what is needed to go on. nullopt: all inputs.
  std::optional<InputRange> part = std::nullopt;
  /// The panel that will be multiplied next, to be prefetched meanwhile; nullptr when it is not known.
  const std::byte* next_panel = nullptr;
  /// What else is to be prefetched meanwhile.
  std::span<const MemorySpan> fetch = {};
};

/// Rows of a matrix (PanelMatrix::has_rows), wherever they are, as the columns of a panel.
struct GatheredOutputs {
  /// kPanelColumns of them: behind the `count` that are wanted there may be any that can be read.
  const std::byte* const* outputs = nullptr;
  std::int64_t count = 0;
  /// As many that will be read next, to be prefetched meanwhile; nullptr when they are not known.
  const std::byte* const* next = nullptr;
};

/// Groups of k_interleave inputs that are not zero in all rows of a product: `count` of them, ascending.
struct LiveInputs {
  const std::int32_t* groups = nullptr;
  std::int64_t count = 0;
};

/// Inputs that are not zero in all rows of a product: `count` of them, ascending, and where the columns of a
/// matrix begin that they are multiplied with.
struct LiveColumns {
  const std::int32_t* inputs = nullptr;
  const std::byte* const* columns = nullptr;
  std::int64_t count = 0;
};

/// ColumnGemm::width, at most.
inline constexpr std::int64_t kMostColumnOutputs = 16 * kPanelColumns;

/// out[rows, width] = a[rows, k] * W[first to first + width, k]^T for a W that has columns
/// (PanelMatrix::has_columns), with the bits of PanelGemm.
struct ColumnGemm {
  /// float32, or bfloat16 for a W of bfloat16.
  const void* a = nullptr;
  std::int64_t a_stride = 0;  ///< elements between rows
  std::int64_t k = 0;
  LiveColumns live;
  std::int64_t first = 0;
  std::int64_t width = 0;  ///< whole panels
  /// Panel by panel: [width / kPanelColumns][rows][kPanelColumns].
  float* out = nullptr;
  std::int64_t rows = 0;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T for a panel of QuantAlgo::kW8A16 or kW4A16.
///
/// For each group of inputs, the activations are multiplied by the integers (without kW4A16's zero points, by
/// u - 8), in the order of a PanelGemm over those inputs; (zero - 8) times the sum of the activations is
/// taken off, and the result times the scale is added to the groups before. Bits do not depend on the other
/// rows, nor on `expanded`.
struct QuantizedGemm {
  const void* a = nullptr;             ///< of `activation`
  DType activation = DType::kFloat32;  ///< kFloat32 or kBFloat16
  std::int64_t a_stride = 0;           ///< elements between rows
  const std::byte* a_steps = nullptr;  ///< see PanelGemm
  std::int64_t a_step_bytes = 0;
  /// With zero points: what sum_groups made of each row, [rows, groups].
  const float* a_sums = nullptr;
  Quantization quantization;
  const std::byte* panel = nullptr;  ///< one panel of a quantised PanelMatrix
  /// What expand_panel made of `panel`; nullptr: the weights are decoded on the way.
  const std::byte* expanded = nullptr;
  std::int64_t k = 0;
  std::int64_t width = 0;  ///< 1 to kPanelColumns
  float* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;
  /// See PanelGemm; parts are of whole groups where there are several.
  std::optional<InputRange> part = std::nullopt;
  /// The panel that will be multiplied next, to be prefetched meanwhile; nullptr when it is not known.
  const std::byte* next_panel = nullptr;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T for a panel of QuantAlgo::kW8A8: the sum over k in exact
/// integers, times the output's scale, times the row's. All tables give the same bits.
struct Int8Gemm {
  /// What quantize_row made; a row's bytes are padded to a multiple of 4.
  const std::uint8_t* a = nullptr;
  std::int64_t a_stride = 0;        ///< bytes between rows
  const float* a_scales = nullptr;  ///< one a row
  const std::byte* panel = nullptr;
  std::int64_t k = 0;
  std::int64_t width = 0;  ///< 1 to kPanelColumns
  float* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;
  std::optional<InputRange> part = std::nullopt;  ///< see PanelGemm
  /// The panel that will be multiplied next, to be prefetched meanwhile; nullptr when it is not known.
  const std::byte* next_panel = nullptr;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T for a panel of QuantAlgo::kW4A8. Of each group of inputs
/// the sum of q * (u - zero) is an exact integer; as float32 it is multiplied with the scale and added to the
/// groups before, from zero on, with one rounding where the instruction set has such a multiply-add: tables
/// of those give the same bits. In the end it is multiplied with the row's scale.
struct W4A8Gemm {
  /// What quantize_row and then arrange_int8_row made. From the first input of any group on, 64 bytes of a
  /// row can be read, and so can whole blocks of 16 rows.
  const std::int8_t* a = nullptr;
  std::int64_t a_stride = 0;             ///< bytes between rows
  const float* a_scales = nullptr;       ///< one a row
  const std::int32_t* a_sums = nullptr;  ///< [rows, groups], of arrange_int8_row
  Quantization quantization;
  const std::byte* panel = nullptr;
  std::int64_t k = 0;
  std::int64_t width = 0;  ///< 1 to kPanelColumns
  float* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;
  std::optional<InputRange> part = std::nullopt;  ///< see PanelGemm; of whole groups where there are several
  /// The panel that will be multiplied next, to be prefetched meanwhile; nullptr when it is not known.
  const std::byte* next_panel = nullptr;
};

/// out [heads, head_dim] = x [heads, head_dim] * factor, stored as `out_type`, where the pairs (x[i], x[half
/// + i]) of each head are rotated first by the angles whose cosine and sine [half] are given.
struct HeadRotation {
  const float* cosine = nullptr;
  const float* sine = nullptr;
  std::int64_t half = 0;  ///< at most head_dim / 2
  const float* x = nullptr;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  float factor = 1.0F;
  std::byte* out = nullptr;  ///< may be x
  DType out_type = DType::kFloat32;
};

/// out [rows, width] = function(x + bias) * (linear + linear_bias), stored as `out_type`: the end of a gated
/// layer, or of an activated one, for a tile of its outputs. Functions of bfloat16 outputs are within 3e-4 of
/// themselves, less than a tenth of what rounding may change.
struct ActivatedTile {
  const float* x = nullptr;
  const float* linear = nullptr;       ///< nullptr: no factor
  std::int64_t stride = 0;             ///< floats from row to row of x and linear
  const float* bias = nullptr;         ///< [width]; nullptr: none
  const float* linear_bias = nullptr;  ///< the same
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::byte* out = nullptr;  ///< may be x, with the bytes of `stride`
  std::int64_t out_stride = 0;
  DType out_type = DType::kFloat32;
  /// Of relu_mul and relu_mul_relu: x up to it counts as 0.
  float threshold = 0.0F;
};

/// out [width] = weights[0] * rows[row_of[0]] + weights[1] * rows[row_of[1]] + ..., each product and each sum
/// rounded.
struct WeightedRows {
  const float* rows = nullptr;
  std::int64_t stride = 0;  ///< floats from row to row
  const std::int32_t* row_of = nullptr;
  const float* weights = nullptr;
  std::int64_t count = 0;  ///< at least 1
  std::int64_t width = 0;
  float* out = nullptr;
  bool accumulate = false;  ///< the sum is added to `out`
};

/// out [row_of[r]] += weights[r] * rows[r] for `count` rows, each product and each sum rounded. No two of
/// them have the same place.
struct ScatteredRows {
  const float* rows = nullptr;
  std::int64_t stride = 0;  ///< floats from row to row
  const std::int32_t* row_of = nullptr;
  const float* weights = nullptr;
  std::int64_t count = 0;
  std::int64_t width = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
};

/// KernelTable::block_rows of kernels that read rows as they are, and of other activations than bfloat16: the
/// sums of a tile, of two parts at once, stay in the first-level cache.
inline constexpr std::int64_t kVectorBlockRows = 48;

/// Rows of some bytes, `stride` bytes apart.
struct SourceRows {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t bytes = 0;
  /// Which of them are read, one after the other; nullptr: all.
  const std::int32_t* row_of = nullptr;

  [[nodiscard]] const std::byte* row(std::int64_t index) const {
    return data + (row_of == nullptr ? index : row_of[index]) * stride;
  }
};

/// What KernelTable::pack_rows makes of rows of bfloat16: steps, with so many bytes of each row one after
/// another, and whole blocks of rows.
struct PackedSteps {
  static constexpr std::int64_t kRowBytes = 64;
  static constexpr std::int64_t kBlockRows = 16;

  /// Steps of rows of so many bytes, and blocks of so many rows.
  static constexpr std::int64_t steps_of(std::int64_t row_bytes) {
    return (row_bytes + kRowBytes - 1) / kRowBytes;
  }
  static constexpr std::int64_t blocks_of(std::int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }
};

/// The kernels of one instruction set. All are pure functions of their arguments; n may be any number >= 0
/// and nothing needs more than its elements' alignment.
struct KernelTable {
  std::string_view name;

  /// Rows of bfloat16 activations that a panel is multiplied by at once.
  std::int64_t block_rows;
  /// Bytes of activations that stay in the cache while one panel after the other is multiplied; of a panel a
  /// quarter. Longer inputs are taken in parts of part_bytes, of a panel a quarter, beside which the sums of
  /// several panels have room. 0: these kernels take no parts.
  std::int64_t whole_bytes;
  std::int64_t part_bytes;
  /// Rows up to which a panel is read as it comes from memory; with more, the one that is multiplied and the
  /// next, which is fetched meanwhile, are in the cache as well.
  std::int64_t streamed_rows;
  /// Rows up to which gemm and compressed_gemm, and quantized_gemm of one row of integers of few bits, read
  /// rows of bfloat16 as fast as they are as packed. 0: they are packed, or never.
  std::int64_t few_rows;
  /// Copies `count` rows of bfloat16 into PackedSteps for PanelGemm::a_steps: row r's bytes from 64 s on go
  /// to out + s * step_bytes + 64 r, zeros behind them and below them up to a whole block of rows. nullptr:
  /// these kernels read rows as they are.
  void (*pack_rows)(const SourceRows& rows, std::int64_t count, std::byte* out, std::int64_t step_bytes);
  /// Copies `count` rows, `bytes` long and `stride` bytes apart, to rows `out_stride` bytes apart, past the
  /// caches: for more than they hold until it is read. nullptr: these kernels write through caches.
  void (*stream_rows)(const std::byte* rows, std::int64_t stride, std::int64_t count, std::int64_t bytes,
                      std::byte* out, std::int64_t out_stride);
  /// Gives back what these kernels hold of a thread's state. For threads of the caller's, after a step.
  void (*leave_thread)();

  /// By DType of the panel.
  std::array<void (*)(const PanelGemm& gemm), 3> gemm;

  /// The same of a compressed bfloat16 panel with places for `exceptions`, to the same bits, for a full
  /// panel, at most compressed_rows rows and without `accumulate`.
  void (*compressed_gemm)(const PanelGemm& gemm, std::int64_t exceptions);
  /// 0: there is no compressed_gemm.
  std::int64_t compressed_rows;
  /// Writes a compressed panel of k inputs as the bfloat16 panel that it stands for.
  void (*expand_compressed)(const std::byte* panel, std::int64_t k, std::int64_t exceptions, std::byte* out);

  /// The same of a full panel with a code, at most coded_rows rows and without `accumulate`: the
  /// bits of `gemm` with what expand_coded makes of the panel. By DType of what it stands for, the engine's.
  std::array<void (*)(const PanelGemm& gemm, const Quantization& how), 3> coded_gemm;
  /// By the same DType; 0: there is no coded_gemm.
  std::array<std::int64_t, 3> coded_rows;
  /// By the same DType: writes a panel with a code as the panel of that type that it stands for.
  std::array<void (*)(const std::byte* panel, const Quantization& how, std::int64_t k, std::int64_t width,
                      std::byte* out),
             3>
      expand_coded;

  /// Writes outputs of `words` four-byte words as the panel [words][kPanelColumns] that they are columns of,
  /// zeros behind the `count` that are wanted.
  void (*gather_outputs)(const GatheredOutputs& gathered, std::int64_t words, std::byte* out);
  /// By DType: the bits of `gemm` with the panel that gather_outputs makes, which stays in the first-level
  /// cache, for at most sparse_rows rows and without `accumulate`. nullptr where panels are gathered whole.
  std::array<void (*)(const PanelGemm& gemm, const GatheredOutputs& gathered), 3> gathered_gemm;
  /// By DType: the same product of a full panel as `gemm`, of which only the lines of the live inputs are
  /// read, for at most sparse_rows rows and without `accumulate`. Sums that are zero may have the other sign.
  std::array<void (*)(const PanelGemm& gemm, const LiveInputs& live), 3> sparse_gemm;
  /// By DType: the same product with whole columns, for at most sparse_rows rows.
  std::array<void (*)(const ColumnGemm& gemm), 3> column_gemm;
  /// By DType.
  std::array<std::int64_t, 3> sparse_rows;

  /// By DType of the activations: there are none of float16. Of integers, not of codes.
  std::array<void (*)(const QuantizedGemm& gemm), 3> quantized_gemm;
  /// Writes gemm.panel's integers to `out` [ceil(k / ki)][width][ki] in gemm.activation's type, for
  /// QuantizedGemm::expanded.
  std::array<void (*)(const QuantizedGemm& gemm, std::byte* out), 3> expand_panel;
  /// out[groups] = the sum of each group_size elements of x [n]; 0: of all.
  void (*sum_groups)(const std::byte* x, DType type, std::int64_t n, std::int64_t group_size, float* out);
  /// Rows up to which a QuantizedGemm without an expanded panel is as fast as expanding one for it.
  std::int64_t int8_decoded_rows;
  std::int64_t int4_decoded_rows;
  void (*int8_gemm)(const Int8Gemm& gemm);
  /// Rounds a row of `type` to q = round(x / scale), to nearest even, with scale = max|x| / 127; out[n] = q +
  /// 128, then 128 up to a multiple of 4. Rows below 2^-100 become 0. The scale of a row with NaN or infinity
  /// is NaN.
  void (*quantize_row)(const std::byte* x, DType type, std::int64_t n, std::uint8_t* out, float* scale);
  void (*w4a8_gemm)(const W4A8Gemm& gemm);
  /// Makes what w4a8_gemm reads of a row of n bytes of quantize_row, in their place: q, each kOrderedInputs
  /// of them in the order of int8_order(), and zeros behind them up to a multiple of so many. sums[groups] =
  /// the sum of each group's q.
  void (*arrange_int8_row)(std::uint8_t* row, std::int64_t n, const Quantization& how, std::int32_t* sums);

  /// out[n] = x / sqrt(mean(x^2) + epsilon) * weight, stored as `out_type`. `out` may be `x`.
  void (*rms_norm)(const float* x, const float* weight, float epsilon, std::int64_t n, std::byte* out,
                   DType out_type);
  /// silu(x) = x / (1 + exp(-x)).
  void (*silu)(const ActivatedTile& tile);
  /// out[n] += x.
  void (*add)(const float* x, std::int64_t n, float* out);
  /// out[n] *= x.
  void (*multiply)(const float* x, std::int64_t n, float* out);
  void (*add_up_rows)(const WeightedRows& rows);
  void (*scatter_rows)(const ScatteredRows& rows);
  /// out[n] = x * factor, stored as `out_type`.
  void (*scale_and_store)(const float* x, float factor, std::int64_t n, std::byte* out, DType out_type);
  void (*rotate_heads)(const HeadRotation& rotation);
  /// out[n][2] = (even, odd) in bfloat16; returns whether all are finite there.
  bool (*store_bfloat16_pairs)(const float* even, const float* odd, std::int64_t n, std::byte* out);
  /// Whether x[n] are finite, and stay so when they are rounded to `type`.
  bool (*are_finite)(const float* x, std::int64_t n, DType type);
  /// By DType of keys and values, or of the engine where they are int8: takes tiles into the rows' greatest,
  /// totals and sums.
  std::array<void (*)(const AttentionRows& rows, const KeyTiles& tiles), 3> attend;
  /// out[n] = sums / (sum of totals) of one row, stored as `out_type`.
  void (*finish_attention)(const float* sums, const float* totals, std::int64_t n, std::byte* out,
                           DType out_type);
  /// out[n] = exp(x): within kExpRelativeError for results from 2^-126 to 2^127, and 0 below -87.33.
  void (*exp)(const float* x, std::int64_t n, float* out);
  /// out[n] = (x - mean) / sqrt(variance + epsilon) * weight + bias, stored as `out_type`; `bias` may be
  /// nullptr, and `out` may be `x`.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float epsilon, std::int64_t n,
                     std::byte* out, DType out_type);
  /// gelu(x) = x Phi(x).
  void (*gelu)(const ActivatedTile& tile);
  /// Its approximation x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
  void (*gelu_tanh)(const ActivatedTile& tile);
  /// x[n] = cap * tanh(x / cap).
  void (*softcap)(float cap, std::int64_t n, float* x);
  /// relu(x) = max(x, 0).
  void (*relu)(const ActivatedTile& tile);
  /// x * linear, and +0 where x + bias is at most the threshold, whatever the factor is.
  void (*relu_mul)(const ActivatedTile& tile);
  /// The same with max(linear, 0) for the factor.
  void (*relu_mul_relu)(const ActivatedTile& tile);
  /// gates[n] become the lowest number where a score is below `least`; NaN is not.
  void (*close_gates)(const float* scores, float least, std::int64_t n, float* gates);
  /// g sigmoid(1.702 g) (l + 1) of g = x + bias up to 7, and of l, the factor within -7 and 7.
  void (*clamped_silu_mul)(const ActivatedTile& tile);
};

/// Bound of the relative error of KernelTable::exp: half a unit of rounding of the result, one of the
/// polynomial and its argument, and the polynomial's own 6e-8.
inline constexpr float kExpRelativeError = 2.5e-7F;

/// The tables that this CPU can run: first the one that is chosen for it, then the others in the order of
/// kernel_choice.h.
[[nodiscard]] std::span<const KernelTable* const> available_kernels();

/// The table of that name, or the chosen one for an empty name. Throws ConfigError with kernels_problem() of
/// kernel_choice.h.
[[nodiscard]] const KernelTable& find_kernels(std::string_view name);

}  // namespace adaptrt
