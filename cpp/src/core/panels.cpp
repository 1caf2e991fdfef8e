#include "adaptrt/core/panels.h"

#include <cstring>
#include <vector>

#include "adaptrt/core/convert.h"
#include "unpack_quantized.h"

namespace adaptrt {
namespace {

/// Element offset of (row, column) in the packed matrix.
std::size_t panel_index(DType dtype, std::int64_t n, std::int64_t k, std::int64_t row, std::int64_t column) {
  const std::int64_t ki = k_interleave(dtype);
  const std::int64_t panel = row / kPanelColumns;
  const std::int64_t width = panel_width(n, panel);
  const std::int64_t within = ((column / ki) * width + row % kPanelColumns) * ki + column % ki;
  return static_cast<std::size_t>(panel * kPanelColumns * padded_k(dtype, k) + within);
}

/// Moves a row of elements of the matrix's type to their places. The group's size is known to
/// the compiler, so a group is one move.
template <class Element, std::int64_t kInterleave>
void scatter_row(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t row,
                 const std::byte* source) {
  constexpr std::size_t kGroupBytes = kInterleave * sizeof(Element);
  const std::size_t step = static_cast<std::size_t>(panel_width(n, row / kPanelColumns)) * kGroupBytes;
  std::byte* out = panels + panel_index(dtype, n, k, row, 0) * sizeof(Element);
  const std::int64_t groups = k / kInterleave;
  for (std::int64_t group = 0; group < groups; ++group) {
    std::memcpy(out, source, kGroupBytes);
    out += step;
    source += kGroupBytes;
  }
  if (groups * kInterleave < k) {
    std::memset(out, 0, kGroupBytes);
    std::memcpy(out, source, static_cast<std::size_t>(k - groups * kInterleave) * sizeof(Element));
  }
}

}  // namespace

void pack_panels(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
                 std::int64_t rows, const std::byte* source, DType source_dtype, std::int64_t source_stride) {
  std::vector<std::byte> converted(source_dtype == dtype ? 0 : static_cast<std::size_t>(k) * size_of(dtype));
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::byte* row = source + i * source_stride * static_cast<std::int64_t>(size_of(source_dtype));
    if (source_dtype != dtype) {
      convert_elements(converted.data(), dtype, row, source_dtype, static_cast<std::size_t>(k));
      row = converted.data();
    }
    switch (dtype) {
      case DType::kFloat32:
        scatter_row<std::uint32_t, k_interleave(DType::kFloat32)>(panels, dtype, n, k, first_row + i, row);
        break;
      case DType::kFloat16:
        scatter_row<std::uint16_t, k_interleave(DType::kFloat16)>(panels, dtype, n, k, first_row + i, row);
        break;
      case DType::kBFloat16:
        scatter_row<std::uint16_t, k_interleave(DType::kBFloat16)>(panels, dtype, n, k, first_row + i, row);
        break;
    }
  }
}

void unpack_panel_row(const PanelMatrix& matrix, std::int64_t row, float* out) {
  if (matrix.quantization.algo != QuantAlgo::kNone) {
    unpack_quantized_row(matrix, row, out);
    return;
  }
  for (std::int64_t column = 0; column < matrix.k; ++column) {
    out[column] =
        load_as_float(matrix.data, matrix.dtype, panel_index(matrix.dtype, matrix.n, matrix.k, row, column));
  }
}

}  // namespace adaptrt
