#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

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

/// A packed W[n, k] in somebody else's memory.
struct PanelMatrix {
  const std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t n = 0;
  std::int64_t k = 0;
  /// Keeps `data` alive where nothing else does.
  std::shared_ptr<const void> owner = nullptr;

  [[nodiscard]] std::size_t bytes() const { return panel_bytes(dtype, n, k); }
};

/// Packs rows [first_row, first_row + rows) of W[n, k] into `panels` (panel_bytes(dtype, n, k) bytes).
/// `source` holds those rows of `source_dtype`, `source_stride` elements apart; element (row, k) is
/// multiplied by nothing and rounded to nearest even. Writing all n rows, in any number of calls, writes
/// every byte.
void pack_panels(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
                 std::int64_t rows, const std::byte* source, DType source_dtype, std::int64_t source_stride);

/// The inverse for one row: writes W[row, 0..k) to `out` as float32.
void unpack_panel_row(const PanelMatrix& matrix, std::int64_t row, float* out);

}  // namespace adaptrt
