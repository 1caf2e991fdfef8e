#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/dtype.h"
#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/attention_tile.h"

namespace adaptrt {

/// Memory to prefetch.
struct MemorySpan {
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

/// Inputs [begin, end) of a product.
struct InputRange {
  std::int64_t begin;
  std::int64_t end;
};

/// Rows of activations, the panel that multiplies them, and their product: the arguments that all products
/// with panels share. The owner of a GemmCall says which types `a` and `panel` have.
struct GemmCall {
  const void* a = nullptr;
  std::int64_t a_stride = 0;         ///< between rows, in elements (in bytes for 8-bit activations)
  const std::byte* panel = nullptr;  ///< one panel of a PanelMatrix
  std::int64_t k = 0;
  std::int64_t width = 0;  ///< 1 to kPanelColumns
  float* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;
  /// For tables with part_bytes: the range of inputs to multiply now, nullopt for all. If there are several
  /// quantisation groups, a part has whole groups. The parts of a panel come in order; before the last one,
  /// `out` holds intermediate sums.
  std::optional<InputRange> part = std::nullopt;
  /// The next panel, to be prefetched; nullptr if it is unknown.
  const std::byte* next_panel = nullptr;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T, or += if `accumulate`.
///
/// The order in which an element is summed over k depends only on k, width and the table of kernels. So its
/// bits do not depend on the other rows, nor on how k is split into parts. With `accumulate` the sum either
/// is added to `out` or starts from it; this is fixed for each table and type.
struct PanelGemm {
  /// a: float32, or bfloat16 for bfloat16 panels. panel: [ceil(k / ki)][width][ki].
  GemmCall call;
  /// Packed rows from KernelTable::pack_rows, or nullptr: the first step of the first row. a_step_bytes is
  /// the distance between steps. If it is set, gemm, compressed_gemm and codebook_gemm do not read `a`.
  const std::byte* a_steps = nullptr;
  std::int64_t a_step_bytes = 0;
  /// Only for panels that are in the cache already.
  bool accumulate = false;
  /// Other memory to be prefetched.
  std::span<const MemorySpan> fetch = {};
};

/// out[rows, kPanelColumns] += a[rows, k] * panel[kPanelColumns, k]^T for a bfloat16 panel or a panel of a
/// compressed matrix.
struct AddedProduct {
  const std::byte* a = nullptr;      ///< bfloat16
  std::int64_t a_stride = 0;         ///< bytes between rows
  const std::byte* panel = nullptr;  ///< read unless `compressed` is set
  const MatrixPanel* compressed = nullptr;
  std::int64_t k = 0;
  float* out = nullptr;  ///< rows are kPanelColumns floats apart
  std::int64_t rows = 0;
};

/// Rows of a matrix (PanelMatrix::has_rows), at any address, used as the columns of a panel.
struct GatheredOutputs {
  /// [kPanelColumns]; pointers after the first `count` may be any readable rows.
  const std::byte* const* outputs = nullptr;
  std::int64_t count = 0;
  /// The next such array, to be prefetched; nullptr if it is unknown.
  const std::byte* const* next = nullptr;
};

/// The `count` groups of k_interleave inputs that are not zero in all rows of a product, ascending.
struct LiveInputs {
  const std::int32_t* groups = nullptr;
  std::int64_t count = 0;
};

/// The `count` inputs that are not zero in all rows of a product, ascending, and the address of each one's
/// matrix column.
struct LiveColumns {
  const std::int32_t* inputs = nullptr;
  const std::byte* const* columns = nullptr;
  std::int64_t count = 0;
};

/// Maximum of ColumnGemm::width.
inline constexpr std::int64_t kMostColumnOutputs = 16 * kPanelColumns;

/// out[rows, width] = a[rows, k] * W[first to first + width, k]^T for a W with columns
/// (PanelMatrix::has_columns). The bits are those of PanelGemm.
struct ColumnGemm {
  /// Type: float32, or bfloat16 for a bfloat16 W.
  const void* a = nullptr;
  std::int64_t a_stride = 0;  ///< elements between rows
  std::int64_t k = 0;
  LiveColumns live;
  std::int64_t first = 0;
  std::int64_t width = 0;  ///< a multiple of the panel width
  /// Ordered by panel: [width / kPanelColumns][rows][kPanelColumns].
  float* out = nullptr;
  std::int64_t rows = 0;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T for a panel of QuantAlgo::kW8A16 or kW4A16.
///
/// For each group of inputs, activations are multiplied by integers and summed in the order of a PanelGemm
/// over those inputs. The integers are q for kW8A16. For kW4A16 they are u - 8 with zero points, and
/// u - 2^(bits - 1) without. If there are zero points, (zero - middle_of_zeros()) times the sum of the
/// activations is then subtracted; if there are minimums, middle_of_minimums() times that sum is added. The
/// result times the scale is added to the earlier groups. A minimum times the sum of the activations is
/// subtracted last. The bits depend neither on the other rows nor on `expanded`.
struct QuantizedGemm {
  GemmCall call;                       ///< a: type `activation`; panel: of a quantised PanelMatrix
  DType activation = DType::kFloat32;  ///< kFloat32 or kBFloat16
  const std::byte* a_steps = nullptr;  ///< see PanelGemm
  std::int64_t a_step_bytes = 0;
  /// The results of sum_groups for each row, [rows, groups]; read only if needs_group_sums().
  const float* a_sums = nullptr;
  Quantization quantization;
  /// The result of expand_panel for the panel; nullptr: the kernel decodes the weights.
  const std::byte* expanded = nullptr;
  /// For one group without typed scales: scales [width] that replace those after the panel's weights, which
  /// then need not be there. nullptr: the panel's.
  const float* scales = nullptr;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T for a panel of QuantAlgo::kW8A8: the sum over k in exact
/// integers, times the output's scale, times the row's. All tables give the same bits.
struct Int8Gemm {
  /// a: uint8 from quantize_row; rows are padded to a multiple of 4 bytes.
  GemmCall call;
  const float* a_scales = nullptr;  ///< one per row
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T for a panel of QuantAlgo::kW8A16 or kW4A16 without a
/// codebook, and activations from round_to_int16.
///
/// For each span (InputSpan) the sum of q * (u - zero) is an exact integer. As float32 it is multiplied by
/// the weights' scale. If there are minimums, the minimum times the sum of q is subtracted. The result times
/// the activations' scale, which rounds nothing, is added to the spans before. All tables give the same bits,
/// as long as results are neither subnormal nor infinite.
struct Int16Gemm {
  /// a: int16 from round_to_int16; rows are padded to padded_int16_inputs(k) elements. `part` is not used.
  GemmCall call;
  const float* a_scales = nullptr;       ///< [rows, spans], from round_to_int16
  const std::int32_t* a_sums = nullptr;  ///< [rows, spans], from round_to_int16
  std::int64_t spans = 0;                ///< span_count(quantization, k)
  Quantization quantization;
};

/// out[rows, width] = a[rows, k] * panel[width, k]^T for a panel of QuantAlgo::kW4A8. For each group of
/// inputs the sum of q * (u - zero) is an exact integer. As float32 it is multiplied by the scale and added
/// to the sum of the earlier groups, starting from zero. This is one fused multiply-add with one rounding if
/// the instruction set has it; all such tables give the same bits. Finally the sum is multiplied by the row's
/// scale.
struct W4A8Gemm {
  /// a: int8 from quantize_row and then arrange_int8_row. From the first input of any group, 64 bytes must be
  /// readable, and blocks of 16 rows must be readable as a whole.
  GemmCall call;
  const float* a_scales = nullptr;       ///< one per row
  const std::int32_t* a_sums = nullptr;  ///< [rows, groups], from arrange_int8_row
  Quantization quantization;
};

/// Rotates the pairs (x[i], x[half + i]) of each head by the angles with the given cosine and sine [half].
/// Then out [heads, head_dim] = x [heads, head_dim] * factor, stored as `out_type`.
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

/// out [rows, width] = function(x + bias) * (linear + linear_bias), stored as `out_type`: the activation of a
/// gated or plain layer, for a tile of its outputs. For bfloat16 outputs, functions have a relative error up
/// to 3e-4, less than a tenth of the rounding error.
struct ActivatedTile {
  const float* x = nullptr;
  const float* linear = nullptr;       ///< nullptr: factor 1
  std::int64_t stride = 0;             ///< floats between rows of x and linear
  const float* bias = nullptr;         ///< [width]; nullptr for none
  const float* linear_bias = nullptr;  ///< [width]; nullptr for none
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::byte* out = nullptr;  ///< may be x, with `stride` floats between rows
  std::int64_t out_stride = 0;
  DType out_type = DType::kFloat32;
  /// For relu_mul and relu_mul_relu: values of x that are not greater count as 0.
  float threshold = 0.0F;
};

/// out [width] = weights[0] * rows[row_of[0]] + weights[1] * rows[row_of[1]] + ..., with each product and
/// each sum rounded.
struct WeightedRows {
  const float* rows = nullptr;
  std::int64_t stride = 0;  ///< floats between rows
  const std::int32_t* row_of = nullptr;
  const float* weights = nullptr;
  std::int64_t count = 0;  ///< at least 1
  std::int64_t width = 0;
  float* out = nullptr;
  bool accumulate = false;  ///< add the sum to `out`
};

/// out [row_of[r]] += weights[r] * rows[r] for `count` rows, with each product and each sum rounded. The
/// target rows must be different.
struct ScatteredRows {
  const float* rows = nullptr;
  std::int64_t stride = 0;  ///< floats between rows
  const std::int32_t* row_of = nullptr;
  const float* weights = nullptr;
  std::int64_t count = 0;
  std::int64_t width = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
};

/// A causal convolution of each column by itself, in place: x[row] = silu(bias + the sum over taps i of
/// weight[i]
/// * input[row - taps + 1 + i]). Each product is added to the sum of the earlier taps.
struct CausalConvolution {
  float* x = nullptr;       ///< [rows, width]
  std::int64_t stride = 0;  ///< floats between rows of x
  std::int64_t rows = 0;
  std::int64_t width = 0;
  const float* weight = nullptr;  ///< [taps, width]
  std::int64_t taps = 0;          ///< at least 1
  float* state = nullptr;         ///< [taps - 1, width]: the inputs before x; becomes the newest inputs
  std::int64_t tap_stride = 0;    ///< floats between rows of weight, and of the state
  const float* bias = nullptr;    ///< [width]: the sums start from it; nullptr: from zero
};

/// A convolution like CausalConvolution, but of before * x, without activation, multiplied by `after`.
struct GatedConvolution {
  const float* before = nullptr;  ///< [rows, width]
  const float* after = nullptr;   ///< [rows, width]
  const float* x = nullptr;       ///< [rows, width]
  std::int64_t stride = 0;        ///< floats between rows of before, after and x
  std::int64_t rows = 0;
  std::int64_t width = 0;
  const float* weight = nullptr;  ///< [taps, width]
  const float* bias = nullptr;    ///< [width]: the sums start from it; nullptr: from zero
  std::int64_t taps = 0;          ///< at least 1
  float* state = nullptr;         ///< [taps - 1, width]: the products before x; becomes the newest products
  std::int64_t tap_stride = 0;    ///< floats between rows of weight, and of the state
  std::byte* out = nullptr;       ///< [rows, width]
  std::int64_t out_stride = 0;    ///< elements between rows of out
  DType out_type = DType::kFloat32;
};

/// The gated delta rule for one value head, or for some of its columns, one row after the other:
///
///   state = decay * state + key^T ((value - decay * key state) * beta),  out = query state
///
/// A sum over the keys' elements consists of four sums, of which element i goes to sum i % 4. So the bits of
/// a column depend neither on the other columns nor on the number of rows of a call.
struct GatedDelta {
  const float* query = nullptr;  ///< [rows, key_dim]
  const float* key = nullptr;    ///< [rows, key_dim]
  const float* value = nullptr;  ///< [rows, width]
  std::int64_t stride = 0;       ///< floats between rows of query, key and value
  const float* beta = nullptr;   ///< [rows]
  const float* decay = nullptr;  ///< [rows]
  std::int64_t gate_stride = 0;  ///< floats between elements of beta and of decay
  std::int64_t rows = 0;
  std::int64_t key_dim = 0;
  std::int64_t width = 0;
  float* state = nullptr;  ///< [key_dim, width]
  std::int64_t state_stride = 0;
  float* out = nullptr;  ///< [rows, width]
  std::int64_t out_stride = 0;
};

/// Mamba 2's selective scan for one head, or for some of its columns, one row after the other:
///
///   state = exp(rate * time) * state + b^T (x * time),  out = c state + skip * x
///
/// Sums are those of GatedDelta.
struct SelectiveScan {
  const float* x = nullptr;     ///< [rows, width]
  const float* b = nullptr;     ///< [rows, state_dim]
  const float* c = nullptr;     ///< [rows, state_dim]
  const float* time = nullptr;  ///< [rows]
  std::int64_t stride = 0;      ///< floats between rows of x, b, c and time
  std::int64_t rows = 0;
  std::int64_t state_dim = 0;
  std::int64_t width = 0;
  float rate = 0.0F;
  float skip = 0.0F;
  float* state = nullptr;  ///< [state_dim, width]
  std::int64_t state_stride = 0;
  float* out = nullptr;  ///< [rows, width]
  std::int64_t out_stride = 0;
};

/// Parameters of xIELU: positive x^2 + linear x for x > 0, otherwise negative (expm1(min(x, bound)) - x) +
/// linear x.
struct XieluParameters {
  float positive = 0.0F;
  float negative = 0.0F;
  float linear = 0.0F;
  float bound = 0.0F;
};

/// KernelTable::block_rows of kernels that read unpacked rows, or activations other than bfloat16. The sums
/// of two tiles of so many rows fit in the L1 cache.
inline constexpr std::int64_t kVectorBlockRows = 48;

/// Rows of `bytes` bytes, `stride` bytes apart.
struct SourceRows {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t bytes = 0;
  /// Indices of the rows to read, in order; nullptr: all rows.
  const std::int32_t* row_of = nullptr;

  [[nodiscard]] const std::byte* row(std::int64_t index) const {
    return data + (row_of == nullptr ? index : row_of[index]) * stride;
  }
};

/// Layout of bfloat16 rows packed by KernelTable::pack_rows: steps, each with kRowBytes bytes of every row,
/// padded to whole blocks of rows.
struct PackedSteps {
  static constexpr std::int64_t kRowBytes = 64;
  static constexpr std::int64_t kBlockRows = 16;

  /// Number of steps of rows with `row_bytes` bytes, and number of blocks of rows.
  static constexpr std::int64_t steps_of(std::int64_t row_bytes) {
    return (row_bytes + kRowBytes - 1) / kRowBytes;
  }
  static constexpr std::int64_t blocks_of(std::int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }
};

/// The kernels of one instruction set. All are pure functions of their arguments. n may be any number >= 0,
/// and arrays need only the alignment of their elements.
struct KernelTable {
  std::string_view name;

  /// Number of bfloat16 activation rows that a panel is multiplied by at a time.
  std::int64_t block_rows;
  /// Maximum number of bytes of the activations of a product, and four times the maximum number of bytes of
  /// a panel: so much stays in the cache while panels are multiplied one after another. Longer
  /// inputs are split into parts of part_bytes, counted in the same way, which leaves cache space for the
  /// sums of several panels. Panels count only for more than streamed_rows rows. 0: no parts.
  std::int64_t whole_bytes;
  std::int64_t part_bytes;
  /// Maximum number of rows for which a panel is streamed from memory. With more rows, the current panel is
  /// in the cache, and the next one is prefetched to it.
  std::int64_t streamed_rows;
  /// Maximum number of rows for which unpacked bfloat16 rows are as fast as packed ones. It applies to gemm
  /// and compressed_gemm; for quantized_gemm the maximum is one row, and codebook_gemm reads only packed
  /// rows. 0: all rows are packed, or none if pack_rows is nullptr.
  std::int64_t few_rows;
  /// Copies `count` bfloat16 rows into PackedSteps for PanelGemm::a_steps. The 64 bytes of row r from byte 64
  /// s go to out + s * step_bytes + 64 r. The rest of a row's last step, and rows up to a whole block, are
  /// zeros. nullptr: these kernels read unpacked rows.
  void (*pack_rows)(const SourceRows& rows, std::int64_t count, std::byte* out, std::int64_t step_bytes);
  /// Copies `count` rows, `bytes` long and `stride` bytes apart, to rows `out_stride` bytes apart, with
  /// non-temporal stores. For data that would leave the caches before it is read. nullptr: these kernels have
  /// no such stores.
  void (*stream_rows)(const std::byte* rows, std::int64_t stride, std::int64_t count, std::int64_t bytes,
                      std::byte* out, std::int64_t out_stride);
  /// Releases per-thread state of these kernels (AMX tiles). For the caller's threads, after a step.
  void (*release_tiles)();

  /// Indexed by DType of the panel.
  std::array<void (*)(const PanelGemm& gemm), 3> gemm;

  /// Computes products of few rows and inputs, whose panels are in the cache already; the bits are those of
  /// gemm with `accumulate`.
  void (*add_products)(std::span<const AddedProduct> products);
  /// Maximum number of rows of a product for which add_products is faster than gemm. 0: there is no
  /// add_products.
  std::int64_t added_rows;

  /// Product with a compressed bfloat16 panel with places for `outliers`; the bits are those of gemm. The
  /// panel must be full, with at most compressed_rows rows and no `accumulate`.
  void (*compressed_gemm)(const PanelGemm& gemm, std::int64_t outliers);
  /// 0: there is no compressed_gemm.
  std::int64_t compressed_rows;
  /// Expands a compressed panel of k inputs to the bfloat16 panel that it represents.
  void (*expand_compressed)(const std::byte* panel, std::int64_t k, std::int64_t outliers, std::byte* out);

  /// Product with a panel of a compressed matrix, whose pieces are decoded in registers; the bits are those
  /// of gemm. call.panel is not read, call.next_panel has pieces too. Returns false, and computes nothing,
  /// for sizes for which the panel must be expanded. nullptr: it always must be.
  bool (*matrix_panel_gemm)(const PanelGemm& gemm, const MatrixPanel& panel);
  /// Expands a panel of a compressed matrix to the bfloat16 panel that it represents, padded to num_pieces *
  /// kPiecePanelBytes bytes. `next`: the pieces to be prefetched; nullptr if they are unknown.
  void (*expand_matrix_panel)(const MatrixPanel& panel, const std::byte* next, std::byte* out);

  /// Product with a panel with a codebook; the bits are those of `gemm` on the result of expand_codebook. The
  /// panel must be full, with at most codebook_rows rows and no `accumulate`. Indexed by the engine's DType,
  /// which the codes represent.
  std::array<void (*)(const PanelGemm& gemm, const Quantization& how), 3> codebook_gemm;
  /// Indexed by the same DType; 0: there is no codebook_gemm.
  std::array<std::int64_t, 3> codebook_rows;
  /// Indexed by the same DType: expands a panel with a codebook to the panel of that type that it represents.
  std::array<void (*)(const std::byte* panel, const Quantization& how, std::int64_t k, std::int64_t width,
                      std::byte* out),
             3>
      expand_codebook;

  /// Writes outputs of `words` four-byte words as a panel [words][kPanelColumns]; each output becomes a
  /// column, and columns after the first `count` become zeros.
  void (*gather_outputs)(const GatheredOutputs& gathered, std::int64_t words, std::byte* out);
  /// Indexed by DType: product with the panel that gather_outputs makes, which stays in the L1 cache; the
  /// bits are those of `gemm`. At most sparse_rows rows and no `accumulate`. nullptr: these kernels gather
  /// whole panels.
  std::array<void (*)(const PanelGemm& gemm, const GatheredOutputs& gathered), 3> gathered_gemm;
  /// Indexed by DType: the product of `gemm` with a full panel that reads only the lines of live inputs. At
  /// most sparse_rows rows and no `accumulate`. Zero sums may have the other sign.
  std::array<void (*)(const PanelGemm& gemm, const LiveInputs& live), 3> sparse_gemm;
  /// Indexed by DType: the same product from whole columns, for at most sparse_rows rows.
  std::array<void (*)(const ColumnGemm& gemm), 3> column_gemm;
  /// Indexed by DType.
  std::array<std::int64_t, 3> sparse_rows;

  /// Indexed by DType of the activations; none for float16. For integers only, not for codebooks.
  std::array<void (*)(const QuantizedGemm& gemm), 3> quantized_gemm;
  /// Writes the integers of gemm.panel to `out` [ceil(k / ki)][width][ki] in gemm.activation's type, for
  /// QuantizedGemm::expanded.
  std::array<void (*)(const QuantizedGemm& gemm, std::byte* out), 3> expand_panel;
  /// out[groups] = sums of group_size consecutive elements of x [n]; group_size 0: one sum of all.
  void (*sum_groups)(const std::byte* x, DType type, std::int64_t n, std::int64_t group_size, float* out);
  /// Maximum number of rows for which a QuantizedGemm without an expanded panel is as fast as with one.
  std::int64_t int8_decoded_rows;
  std::int64_t int4_decoded_rows;
  /// Indexed by DType of the activations: a QuantizedGemm of any number of rows needs no expanded panel if
  /// its group size divides this number. 0: there is no such size.
  std::array<std::int64_t, 3> stretch_inputs;
  /// nullptr: these kernels multiply bfloat16 faster, and engines of bfloat16 use quantized_gemm.
  void (*int16_gemm)(const Int16Gemm& gemm);
  /// Rounds a bfloat16 row x [n] to int16, with a scale for each InputSpan: a power of two, such that the
  /// largest magnitude of the span is 2^14 to 2^15. So numbers down to 2^-7 of the power of two below the
  /// largest are exact, and others differ by at most 2^-15 of the largest (2^-115 in spans below 2^-100).
  /// Writes out[padded_int16_inputs(n)], padded with zeros, and scales and sums of q [span_count]. If a span
  /// has infinities, q is 1 or -1 for them and 0 for all others, and the scale is infinity. The scale of a
  /// span with NaN is NaN. nullptr if int16_gemm is.
  void (*round_to_int16)(const std::byte* x, std::int64_t n, const Quantization& how, std::int16_t* out,
                         float* scales, std::int32_t* sums);
  void (*int8_gemm)(const Int8Gemm& gemm);
  /// Rounds a row of `type` to q = round(x / scale), to nearest even, with scale = max|x| / 127. Writes q +
  /// 128 to out[n], and pads it with 128 to a multiple of 4. If all |x| are below 2^-100, q and scale are 0.
  /// A row with NaN or infinity gets the scale NaN.
  void (*quantize_row)(const std::byte* x, DType type, std::int64_t n, std::uint8_t* out, float* scale);
  void (*w4a8_gemm)(const W4A8Gemm& gemm);
  /// Rearranges a row of n bytes from quantize_row in place for w4a8_gemm. The row then holds q in the order
  /// that int8_order() gives for each kOrderedInputs inputs, padded with zeros to a multiple of
  /// kOrderedInputs. Writes the sum of each group's q to sums[groups].
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
  /// out[n][2] = (even, odd) in bfloat16; returns true if all are finite after rounding.
  bool (*store_bfloat16_pairs)(const float* even, const float* odd, std::int64_t n, std::byte* out);
  /// True if x[n] are finite and stay finite when rounded to `type`.
  bool (*are_finite)(const float* x, std::int64_t n, DType type);
  /// Indexed by DType of keys and values, or of the engine if they are int8: adds tiles to the rows'
  /// row_max, row_sum and accumulator.
  std::array<void (*)(const AttentionRows& rows, const KeyTiles& tiles), 3> attend;
  /// out[n] = accumulator / (sum of row_sum) for one row, stored as `out_type`.
  void (*finish_attention)(const float* accumulator, const float* row_sum, std::int64_t n, std::byte* out,
                           DType out_type);
  /// out[n] = exp(x): within kExpRelativeError for results from 2^-126 to 2^127, and 0 below x = -87.33.
  void (*exp)(const float* x, std::int64_t n, float* out);
  /// out[n] = (x - mean) / sqrt(variance + epsilon) * weight + bias, stored as `out_type`; `bias` may be
  /// nullptr, and `out` may be `x`.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float epsilon, std::int64_t n,
                     std::byte* out, DType out_type);
  /// gelu(x) = x Phi(x).
  void (*gelu)(const ActivatedTile& tile);
  /// Tanh approximation: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
  void (*gelu_tanh)(const ActivatedTile& tile);
  /// x[n] = cap * tanh(x / cap).
  void (*softcap)(float cap, std::int64_t n, float* x);
  /// relu(x) = max(x, 0).
  void (*relu)(const ActivatedTile& tile);
  /// relu(x)^2.
  void (*relu_squared)(const ActivatedTile& tile);
  /// (x + bias) * (linear + linear_bias), but +0 if x + bias is at most the threshold, for any factor.
  void (*relu_mul)(const ActivatedTile& tile);
  /// The same with the factor max(linear + linear_bias, 0).
  void (*relu_mul_relu)(const ActivatedTile& tile);
  /// gates[n] become the lowest float if their score is below `least`. NaN scores do not change them.
  void (*close_gates)(const float* scores, float least, std::int64_t n, float* gates);
  /// g sigmoid(1.702 g) (l + 1), with g = min(x + bias, 7), and l = the factor clamped to [-7, 7].
  void (*clamped_silu_mul)(const ActivatedTile& tile);
  /// x[n] *= sigmoid(gate), for x of `type`.
  void (*multiply_by_sigmoid)(const float* gate, std::int64_t n, std::byte* x, DType type);
  void (*causal_convolution)(const CausalConvolution& convolution);
  void (*gated_delta)(const GatedDelta& delta);
  void (*gated_convolution)(const GatedConvolution& convolution);
  void (*selective_scan)(const SelectiveScan& scan);
  /// out[n] = xIELU(x), stored as `out_type`.
  void (*xielu)(const XieluParameters& parameters, const float* x, std::int64_t n, std::byte* out,
                DType out_type);
};

/// Bound of the relative error of KernelTable::exp: half a unit of rounding for the result, one for the
/// polynomial and its argument, and the polynomial's own 6e-8.
inline constexpr float kExpRelativeError = 2.5e-7F;

/// Returns the tables that this CPU can run: the chosen one first, then the others in the order of
/// kernel_choice.h.
[[nodiscard]] std::span<const KernelTable* const> available_kernels();

/// Returns the table with this name, or the chosen one for an empty name. Throws ConfigError with
/// kernels_problem() of kernel_choice.h.
[[nodiscard]] const KernelTable& find_kernels(std::string_view name);

}  // namespace adaptrt
