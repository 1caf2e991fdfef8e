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
// A matrix of which single output features are read (PanelMatrix::has_rows) is stored twice: its plain rows
// follow the panels, with element (n, k) at panel_bytes + (n * k_size + k) * size. If single inputs are read
// (PanelMatrix::has_columns), its columns follow instead, with element (n, k) at panel_bytes + (k * n_size +
// n) * size.
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

/// True if a plain W[n, k] can also be stored in rows. Its panels must be whole, and so must its four-byte
/// groups of k, because kernels move such groups.
[[nodiscard]] constexpr bool can_have_rows(DType dtype, std::int64_t n, std::int64_t k) {
  return dtype != DType::kFloat16 && n % kPanelColumns == 0 && k % k_interleave(dtype) == 0;
}

/// True if a plain W[n, k] can also be stored in columns. Its panels must be whole and have no padding.
[[nodiscard]] constexpr bool can_have_columns(DType dtype, std::int64_t n, std::int64_t k) {
  return n % kPanelColumns == 0 && k % k_interleave(dtype) == 0;
}

/// Storage and multiplication of a matrix's weights, with TensorRT-LLM's names.
enum class QuantAlgo : std::uint8_t {
  kNone,   ///< elements of the engine's type
  kW8A16,  ///< int8 or FP8, one scale per output or per group of its inputs; activations of the engine's type
  kW8A8,   ///< the same weights; at run time activations become int8 with one scale per token
  kW4A16,  ///< four bits or fewer, one scale per group of an output's inputs
  kW4A8,   ///< integers of kW4A16; activations of kW8A8
};

/// True if weights have four bits or fewer, so that a word holds several of them.
[[nodiscard]] constexpr bool has_few_bits(QuantAlgo algo) {
  return algo == QuantAlgo::kW4A16 || algo == QuantAlgo::kW4A8;
}

/// True if activations are quantised to int8, with one scale for each token.
[[nodiscard]] constexpr bool rounds_activations(QuantAlgo algo) {
  return algo == QuantAlgo::kW8A8 || algo == QuantAlgo::kW4A8;
}

/// "NONE", "W8A16", "W8A8", "W4A16" or "W4A8".
[[nodiscard]] std::string_view name_of(QuantAlgo algo);

/// Meaning of a weight's bits.
enum class WeightCode : std::uint8_t {
  kInteger,  ///< integers minus a zero point
  kNF4,      ///< kW4A16: numbers of code_table(), multiplied by the scale and rounded
  kFP4,      ///< the same
  kE4M3,     ///< kW8A16: FP8 numbers, scaled and rounded like kNF4; never NaN
  kE2M1,     ///< kW4A16: numbers of code_table(), scaled and rounded like kNF4
  /// kW8A16: integers of bitsandbytes' LLM.int8(). Each is multiplied by its scale and then by
  /// kLLMInt8Factor. Each product is rounded to float32, and the result to value_type.
  kLLMInt8,
};

/// The factor that bitsandbytes uses instead of a division by 127.
inline constexpr float kLLMInt8Factor = 7.874015718698502e-3F;

/// "INTEGER", "NF4", "FP4", "E4M3", "E2M1" or "LLM_INT8".
[[nodiscard]] std::string_view name_of(WeightCode code);

/// Quantisation of a matrix. core/quantized_panels.h describes the layouts.
struct Quantization {
  QuantAlgo algo = QuantAlgo::kNone;
  /// Number of consecutive inputs that share a scale, a multiple of packed_inputs(bits); 0: all inputs share
  /// one. kW8A8 has no groups.
  std::int64_t group_size = 0;
  /// True if each group has its own zero point. kW8A8 has none.
  bool zero_points = false;
  /// True if each group has its own minimum, of scale_type: value = scale * u - minimum. Only integers of
  /// kW8A16 and kW4A16 in groups can have minimums, instead of zero points.
  bool minimums = false;
  /// Type of the scales, if has_typed_scales() is true.
  DType scale_type = DType::kBFloat16;
  WeightCode code = WeightCode::kInteger;
  /// For codebooks: the type that the product of number and scale is rounded to, once, to nearest even.
  DType value_type = DType::kFloat32;
  /// Bits of a weight, for kW4A16 and kW4A8: 4, or 2 or 3 for integers.
  std::int32_t bits = 4;
  /// True if the inputs are permuted and the permutation is stored after the panels, see
  /// PanelMatrix::permutation. Only integers of kW4A16 and kW8A16 can have a permutation.
  bool act_order = false;

  bool operator==(const Quantization&) const = default;

  [[nodiscard]] bool is_codebook() const { return code != WeightCode::kInteger; }
  /// True if products need the sums of the activations of each group.
  [[nodiscard]] bool needs_group_sums() const { return zero_points || minimums; }
};

/// Bytes of a packed W[n, k], quantised or of type `dtype`, including the input permutation if there is one.
[[nodiscard]] std::size_t panel_bytes(const Quantization& quantization, DType dtype, std::int64_t n,
                                      std::int64_t k);

/// Byte offset of panel `panel` of a matrix, quantised or of type `dtype`.
[[nodiscard]] std::size_t panel_offset(const Quantization& quantization, DType dtype, std::int64_t k,
                                       std::int64_t panel);

/// A view of a packed W[n, k].
struct PanelMatrix {
  const std::byte* data = nullptr;
  /// The engine's type: the type of the elements or, for a quantised matrix, of the values that it
  /// represents.
  DType dtype = DType::kFloat32;
  std::int64_t n = 0;
  std::int64_t k = 0;
  /// Keeps `data` alive; nullptr if something else does.
  std::shared_ptr<const void> owner = nullptr;
  Quantization quantization = {};
  /// Number of places for outliers in each compressed bfloat16 panel, see core/compressed_panels.h.
  std::int64_t outliers = kNotCompressed;
  /// True if the rows follow the panels; see can_have_rows.
  bool has_rows = false;
  /// True if the columns follow the panels; see can_have_columns.
  bool has_columns = false;

  /// True if rows or columns follow the panels.
  [[nodiscard]] bool is_stored_twice() const { return has_rows || has_columns; }
  [[nodiscard]] bool is_compressed() const { return outliers != kNotCompressed; }
  /// True if that panel is compressed. A last panel that is narrower than kPanelColumns is not.
  [[nodiscard]] bool is_compressed(std::int64_t panel) const {
    return is_compressed() && panel_width(n, panel) == kPanelColumns;
  }
  /// True if the matrix is neither quantised nor compressed.
  [[nodiscard]] bool is_plain() const { return quantization.algo == QuantAlgo::kNone && !is_compressed(); }
  /// Bytes of the panels and of the rows or columns that follow them.
  [[nodiscard]] std::size_t bytes() const;
  /// Byte offset of panel `panel`.
  [[nodiscard]] std::size_t offset(std::int64_t panel) const;
  /// Address of row `output`; the matrix has rows.
  [[nodiscard]] const std::byte* row(std::int64_t output) const;
  /// Address of column `input`; the matrix has columns.
  [[nodiscard]] const std::byte* column(std::int64_t input) const;
  /// Permutation of the inputs, [k]: input i of the panels is input permutation()[i] of W, and each input
  /// occurs once. Empty without act-order.
  [[nodiscard]] std::span<const std::int32_t> permutation() const;
  /// Bytes of the panels only.
  [[nodiscard]] std::size_t bytes_of_panels() const;
};

/// Packs rows [first_row, first_row + rows) of W[n, k] into `panels` (panel_bytes(dtype, n, k) bytes).
/// `source` has those rows in `source_dtype`, `source_stride` elements apart; each element is rounded to
/// nearest even. Writing all n rows, in any number of calls, writes every byte.
void pack_panels(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
                 std::int64_t rows, const std::byte* source, DType source_dtype, std::int64_t source_stride);

/// Unpacks one row: writes W[row, 0..k) to `out` as float32, with the inputs in the order of W. For a
/// quantised matrix, these are the values that products use; for a compressed one, its elements.
void unpack_panel_row(const PanelMatrix& matrix, std::int64_t row, float* out);

/// Returns W[n, k] of a plain matrix.
[[nodiscard]] float panel_element(const PanelMatrix& matrix, std::int64_t n, std::int64_t k);
/// Writes column k of a plain matrix, float32 [n], to `out`.
void unpack_panel_column(const PanelMatrix& matrix, std::int64_t k, float* out);

}  // namespace adaptrt
