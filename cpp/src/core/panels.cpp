#include "adaptrt/core/panels.h"

#include <cstring>

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

/// Two-byte or four-byte elements that need no conversion, moved as they are.
template <class Element>
void scatter_row(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t row,
                 const std::byte* source) {
  const std::int64_t ki = k_interleave(dtype);
  const std::int64_t step = panel_width(n, row / kPanelColumns) * ki;
  std::byte* out = panels + panel_index(dtype, n, k, row, 0) * sizeof(Element);
  std::int64_t column = 0;
  for (; column + ki <= k; column += ki) {
    std::memcpy(out, source + column * static_cast<std::int64_t>(sizeof(Element)), ki * sizeof(Element));
    out += step * static_cast<std::int64_t>(sizeof(Element));
  }
  if (column < k) {
    std::memset(out, 0, ki * sizeof(Element));
    std::memcpy(out, source + column * static_cast<std::int64_t>(sizeof(Element)),
                static_cast<std::size_t>(k - column) * sizeof(Element));
  }
}

}  // namespace

void pack_panels(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
                 std::int64_t rows, const std::byte* source, DType source_dtype, std::int64_t source_stride) {
  const std::int64_t columns = padded_k(dtype, k);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = first_row + i;
    const std::byte* from = source + i * source_stride * static_cast<std::int64_t>(size_of(source_dtype));
    if (source_dtype == dtype) {
      if (size_of(dtype) == 4) {
        scatter_row<std::uint32_t>(panels, dtype, n, k, row, from);
      } else {
        scatter_row<std::uint16_t>(panels, dtype, n, k, row, from);
      }
      continue;
    }
    for (std::int64_t column = 0; column < columns; ++column) {
      const float value = column < k ? load_as_float(from, source_dtype, static_cast<std::size_t>(column)) : 0.0F;
      store_from_float(panels, dtype, panel_index(dtype, n, k, row, column), value);
    }
  }
}

void unpack_panel_row(const PanelMatrix& matrix, std::int64_t row, float* out) {
  for (std::int64_t column = 0; column < matrix.k; ++column) {
    out[column] = load_as_float(matrix.data, matrix.dtype, panel_index(matrix.dtype, matrix.n, matrix.k, row, column));
  }
}

}  // namespace adaptrt
