#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/dtype.h"

namespace adaptrt {

// The one storage layout of every matrix that is multiplied: base weights, and the A and B of adapters.
//
// A weight W[n, k] (output features, input features) is cut into panels of kPanelColumns output features; the
// last panel is as narrow as what is left, so nothing is padded in n. A panel of width w holds, for each
// group of k_interleave(dtype) consecutive k, the w output features side by side, each with its group of k:
//
//   panel p: [ceil(k / ki)][w][ki]      element (n, k) at ((k / ki) * w + n % 64) * ki + k % ki
//
// ki is 2 for bfloat16, the operand order of the bf16 dot-product instructions, and 1 otherwise. An odd k is
// padded with one zero. The layout does not depend on the instruction set.
//
// Where single output features are read (PanelMatrix::has_rows), W is stored twice: behind the panels are its
// rows as they are, element (n, k) at panel_bytes + (n * k_size + k) * size. Where single inputs are
// (PanelMatrix::has_columns), its columns are there, element (n, k) at panel_bytes + (k * n_size + n) * size.
inline constexpr std::int64_t kPanelColumns = 64;

[[nodiscard]] constexpr std::int64_t k_interleave(DType dtype) {
  return dtype == DType::kBFloat16 ? 2 : 1;
}

/// k rounded up to whole interleave groups.
[[nodiscard]] constexpr std::int64_t padded_k(DType dtype, std::int64_t k) {
  const std::int64_t ki = k_interleave(dtype);
  return (k + ki - 1) / ki * ki;
}

/// Bytes of a packed W[n, k].
[[nodiscard]] constexpr std::size_t panel_bytes(DType dtype, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(n * padded_k(dtype, k)) * size_of(dtype);
}

[[nodiscard]] constexpr std::int64_t panel_count(std::int64_t n) {
  return (n + kPanelColumns - 1) / kPanelColumns;
}

/// Width of panel `panel` of a matrix with n output features.
[[nodiscard]] constexpr std::int64_t panel_width(std::int64_t n, std::int64_t panel) {
  return std::min(kPanelColumns, n - panel * kPanelColumns);
}

/// Byte offset of panel `panel`.
[[nodiscard]] constexpr std::size_t panel_offset(DType dtype, std::int64_t k, std::int64_t panel) {
  return static_cast<std::size_t>(panel * kPanelColumns * padded_k(dtype, k)) * size_of(dtype);
}

/// Whether a plain W[n, k] can be stored in rows as well: of whole panels, and whole groups of k of four
/// bytes, which is what kernels move.
[[nodiscard]] constexpr bool can_have_rows(DType dtype, std::int64_t n, std::int64_t k) {
  return dtype != DType::kFloat16 && n % kPanelColumns == 0 && k % k_interleave(dtype) == 0;
}

/// Whether a plain W[n, k] can be stored in columns as well: of whole panels, without padding.
[[nodiscard]] constexpr bool can_have_columns(DType dtype, std::int64_t n, std::int64_t k) {
  return n % kPanelColumns == 0 && k % k_interleave(dtype) == 0;
}

/// How the weights of a matrix are stored and multiplied, with TensorRT-LLM's names.
enum class QuantAlgo : std::uint8_t {
  kNone,   ///< elements of the engine's type
  kW8A16,  ///< int8 or FP8, one scale an output or each group of its inputs; activations of the engine's type
  kW8A8,   ///< the same weights; activations become int8 with one scale a token at run time
  kW4A16,  ///< four bits or fewer, one scale for each group of an output's inputs
  kW4A8,   ///< integers as kW4A16 has them; activations as those of kW8A8
};

/// Whether weights have four bits or fewer, several of them in a word.
[[nodiscard]] constexpr bool has_few_bits(QuantAlgo algo) {
  return algo == QuantAlgo::kW4A16 || algo == QuantAlgo::kW4A8;
}

/// Whether activations become int8, with one scale a token.
[[nodiscard]] constexpr bool rounds_activations(QuantAlgo algo) {
  return algo == QuantAlgo::kW8A8 || algo == QuantAlgo::kW4A8;
}

/// "NONE", "W8A16", "W8A8", "W4A16" or "W4A8".
[[nodiscard]] std::string_view name_of(QuantAlgo algo);

/// What the bits of a weight stand for.
enum class WeightCode : std::uint8_t {
  kInteger,  ///< integers, less a zero point
  kNF4,      ///< kW4A16: the numbers of code_table(), of which products with scales are made and rounded
  kFP4,      ///< the same
  kE4M3,     ///< kW8A16: numbers of FP8, the same is made of; none is NaN
  kE2M1,     ///< kW4A16: as kNF4
  /// kW8A16: integers of bitsandbytes' LLM.int8(), times a scale and then kLLMInt8Factor, each product
  /// rounded to float32, and then as the others.
  kLLMInt8,
};

/// What bitsandbytes multiplies by where it means to divide by 127.
inline constexpr float kLLMInt8Factor = 7.874015718698502e-3F;

/// "INTEGER", "NF4", "FP4", "E4M3", "E2M1" or "LLM_INT8".
[[nodiscard]] std::string_view name_of(WeightCode code);

/// How a matrix is quantised. core/quantized_panels.h has the layouts.
struct Quantization {
  QuantAlgo algo = QuantAlgo::kNone;
  /// All but kW8A8: consecutive inputs that share a scale, a multiple of packed_inputs(bits); 0: all
  /// inputs.
  std::int64_t group_size = 0;
  /// All but kW8A8: each group has a zero point of its own.
  bool zero_points = false;
  /// The type of the scales where has_typed_scales() says that they have one.
  DType scale_type = DType::kBFloat16;
  WeightCode code = WeightCode::kInteger;
  /// Of codes: what a number times a scale is rounded to, to nearest even, once.
  DType value_type = DType::kFloat32;
  /// kW4A16 and kW4A8: 4 or, of integers, 2 or 3.
  std::int32_t bits = 4;
  /// kW4A16 and kW8A16 of integers: the inputs are in an order of the matrix's own, which is behind the
  /// panels; see PanelMatrix::input_order.
  bool reordered = false;

  bool operator==(const Quantization&) const = default;

  [[nodiscard]] bool is_coded() const { return code != WeightCode::kInteger; }
};

/// Bytes of a packed W[n, k], quantised or of `dtype`, with the order of its inputs where it has one.
[[nodiscard]] std::size_t panel_bytes(const Quantization& quantization, DType dtype, std::int64_t n,
                                      std::int64_t k);

/// Byte offset of panel `panel` of a matrix, quantised or of `dtype`.
[[nodiscard]] std::size_t panel_offset(const Quantization& quantization, DType dtype, std::int64_t k,
                                       std::int64_t panel);

/// A packed W[n, k] in somebody else's memory.
struct PanelMatrix {
  const std::byte* data = nullptr;
  /// The engine's type: of the elements or, of a quantised matrix, of what it stands for.
  DType dtype = DType::kFloat32;
  std::int64_t n = 0;
  std::int64_t k = 0;
  /// Keeps `data` alive where nothing else does.
  std::shared_ptr<const void> owner = nullptr;
  Quantization quantization = {};
  /// Of compressed bfloat16 panels, see core/compressed_panels.h: places for exceptions in each.
  std::int64_t exceptions = kNotCompressed;
  /// Behind the panels are the rows; see can_have_rows.
  bool has_rows = false;
  /// Behind the panels are the columns; see can_have_columns.
  bool has_columns = false;

  /// Whether rows or columns are behind the panels.
  [[nodiscard]] bool is_stored_twice() const { return has_rows || has_columns; }
  [[nodiscard]] bool is_compressed() const { return exceptions != kNotCompressed; }
  /// Whether that panel is: the last one is not where it is narrower than kPanelColumns.
  [[nodiscard]] bool is_compressed(std::int64_t panel) const {
    return is_compressed() && panel_width(n, panel) == kPanelColumns;
  }
  /// Neither quantised nor compressed.
  [[nodiscard]] bool is_plain() const { return quantization.algo == QuantAlgo::kNone && !is_compressed(); }
  /// Of the panels, and of the rows or columns behind them.
  [[nodiscard]] std::size_t bytes() const;
  /// Byte offset of panel `panel`.
  [[nodiscard]] std::size_t offset(std::int64_t panel) const;
  /// Where row `output` begins, of a matrix that has them.
  [[nodiscard]] const std::byte* row(std::int64_t output) const;
  /// The same of column `input`.
  [[nodiscard]] const std::byte* column(std::int64_t input) const;
  /// Of a matrix that is reordered, [k]: input i of the panels is input input_order()[i] of W, and each of
  /// them is there once. Empty of others.
  [[nodiscard]] std::span<const std::int32_t> input_order() const;
  /// Of the panels alone.
  [[nodiscard]] std::size_t bytes_of_panels() const;
};

/// Packs rows [first_row, first_row + rows) of W[n, k] into `panels` (panel_bytes(dtype, n, k) bytes).
/// `source` holds those rows of `source_dtype`, `source_stride` elements apart; element (row, k) is
/// multiplied by nothing and rounded to nearest even. Writing all n rows, in any number of calls, writes
/// every byte.
void pack_panels(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
                 std::int64_t rows, const std::byte* source, DType source_dtype, std::int64_t source_stride);

/// The inverse for one row: writes W[row, 0..k) to `out` as float32, its inputs as they are in W; of a
/// quantised matrix, the values that its products are made of, of a compressed one its elements.
void unpack_panel_row(const PanelMatrix& matrix, std::int64_t row, float* out);

/// W[n, k] of a plain one.
[[nodiscard]] float panel_element(const PanelMatrix& matrix, std::int64_t n, std::int64_t k);
/// Writes W[0..n, k] of such a one to `out`.
void unpack_panel_column(const PanelMatrix& matrix, std::int64_t k, float* out);

}  // namespace adaptrt
