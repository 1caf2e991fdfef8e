#include "adaptrt/core/panels.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "adaptrt/core/convert.h"
#include "unpack_compressed.h"
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

constexpr std::int64_t kRowsConvertedAtATime = 64;

/// Copies a row of elements of the matrix's type into its panel, starting at group `first`. The group size is
/// a template argument, so a group is one move.
template <class Element, std::int64_t kInterleave>
void scatter_row(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t row,
                 const std::byte* source, std::int64_t first = 0) {
  constexpr std::size_t kGroupBytes = kInterleave * sizeof(Element);
  const std::size_t step = static_cast<std::size_t>(panel_width(n, row / kPanelColumns)) * kGroupBytes;
  std::byte* out = panels + panel_index(dtype, n, k, row, first * kInterleave) * sizeof(Element);
  source += static_cast<std::size_t>(first) * kGroupBytes;
  const std::int64_t groups = k / kInterleave;
  for (std::int64_t group = first; group < groups; ++group) {
    std::memcpy(out, source, kGroupBytes);
    out += step;
    source += kGroupBytes;
  }
  if (groups * kInterleave < k) {
    std::memset(out, 0, kGroupBytes);
    std::memcpy(out, source, static_cast<std::size_t>(k - groups * kInterleave) * sizeof(Element));
  }
}

/// Four groups of four bytes each.
using Groups [[gnu::vector_size(16)]] = std::uint32_t;

Groups load_groups(const std::byte* source) {
  Groups groups;
  std::memcpy(&groups, source, sizeof(groups));
  return groups;
}

/// scatter_row for four rows of one panel with four-byte groups. In the panel, the groups of the four rows
/// are adjacent, so blocks of four by four groups are transposed and moved together. The rows of `source` are
/// `stride` bytes apart.
template <class Element, std::int64_t kInterleave>
void scatter_four_rows(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t row,
                       const std::byte* source, std::size_t stride) {
  static_assert(kInterleave * sizeof(Element) == sizeof(std::uint32_t));
  const std::size_t step =
      static_cast<std::size_t>(panel_width(n, row / kPanelColumns)) * sizeof(std::uint32_t);
  std::byte* out = panels + panel_index(dtype, n, k, row, 0) * sizeof(Element);
  const std::int64_t whole = k / kInterleave / 4 * 4;
  for (std::int64_t group = 0; group < whole; group += 4) {
    const std::byte* first = source + group * sizeof(std::uint32_t);
    const Groups a = load_groups(first);
    const Groups b = load_groups(first + stride);
    const Groups c = load_groups(first + 2 * stride);
    const Groups d = load_groups(first + 3 * stride);
    const Groups ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    const Groups ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Groups cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Groups cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const Groups columns[] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                              __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                              __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                              __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
    for (const Groups& column : columns) {
      std::memcpy(out, &column, sizeof(column));
      out += step;
    }
  }
  for (std::int64_t i = 0; i < 4; ++i) {
    scatter_row<Element, kInterleave>(panels, dtype, n, k, row + i, source + i * stride, whole);
  }
}

/// Copies rows of elements of the matrix's type, `stride` bytes apart, into their panels.
void scatter_rows(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
                  std::int64_t rows, const std::byte* source, std::size_t stride) {
  for (std::int64_t i = 0; i < rows;) {
    const std::int64_t row = first_row + i;
    const std::byte* from = source + static_cast<std::size_t>(i) * stride;
    const bool has_four = rows - i >= 4 && row % kPanelColumns <= kPanelColumns - 4;
    i += has_four && dtype != DType::kFloat16 ? 4 : 1;
    switch (dtype) {
      case DType::kFloat32:
        if (has_four) {
          scatter_four_rows<std::uint32_t, k_interleave(DType::kFloat32)>(panels, dtype, n, k, row, from,
                                                                          stride);
        } else {
          scatter_row<std::uint32_t, k_interleave(DType::kFloat32)>(panels, dtype, n, k, row, from);
        }
        break;
      case DType::kBFloat16:
        if (has_four) {
          scatter_four_rows<std::uint16_t, k_interleave(DType::kBFloat16)>(panels, dtype, n, k, row, from,
                                                                           stride);
        } else {
          scatter_row<std::uint16_t, k_interleave(DType::kBFloat16)>(panels, dtype, n, k, row, from);
        }
        break;
      case DType::kFloat16:
        scatter_row<std::uint16_t, k_interleave(DType::kFloat16)>(panels, dtype, n, k, row, from);
        break;
    }
  }
}

/// Number of groups of a row that are gathered before conversion.
constexpr std::int64_t kGroupsGathered = 256;

/// The inverse of scatter_row for a whole row, as float32.
template <class Element, std::int64_t kInterleave>
void gather_row(const PanelMatrix& matrix, std::int64_t row, float* out) {
  constexpr std::size_t kGroupBytes = kInterleave * sizeof(Element);
  const std::size_t step = static_cast<std::size_t>(panel_width(matrix.n, row / kPanelColumns)) * kGroupBytes;
  const std::byte* from = matrix.data + matrix.offset(row / kPanelColumns) +
                          static_cast<std::size_t>(row % kPanelColumns) * kGroupBytes;
  std::array<std::byte, kGroupsGathered * kGroupBytes> gathered;
  constexpr std::int64_t kColumns = kGroupsGathered * kInterleave;
  for (std::int64_t column = 0; column < matrix.k; column += kColumns) {
    const std::int64_t columns = std::min(kColumns, matrix.k - column);
    const std::int64_t groups = (columns + kInterleave - 1) / kInterleave;
    for (std::int64_t group = 0; group < groups; ++group) {
      std::memcpy(gathered.data() + static_cast<std::size_t>(group) * kGroupBytes, from, kGroupBytes);
      from += step;
    }
    convert_elements(reinterpret_cast<std::byte*>(out + column), DType::kFloat32, gathered.data(),
                     matrix.dtype, static_cast<std::size_t>(columns));
  }
}

}  // namespace

void pack_panels(std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
                 std::int64_t rows, const std::byte* source, DType source_dtype, std::int64_t source_stride) {
  const std::size_t stride = static_cast<std::size_t>(source_stride) * size_of(source_dtype);
  if (source_dtype == dtype) {
    scatter_rows(panels, dtype, n, k, first_row, rows, source, stride);
    return;
  }
  // Convert a few rows at a time, so that they are still in the cache when they are moved.
  const std::size_t row_bytes = static_cast<std::size_t>(k) * size_of(dtype);
  const std::int64_t rows_at_a_time = std::min<std::int64_t>(rows, kRowsConvertedAtATime);
  std::vector<std::byte> converted(static_cast<std::size_t>(rows_at_a_time) * row_bytes);
  for (std::int64_t first = 0; first < rows; first += kRowsConvertedAtATime) {
    const std::int64_t count = std::min(rows - first, rows_at_a_time);
    const std::byte* from = source + static_cast<std::size_t>(first) * stride;
    const bool contiguous = source_stride == k;
    for (std::int64_t row = 0; row < (contiguous ? 1 : count); ++row) {
      convert_elements(converted.data() + static_cast<std::size_t>(row) * row_bytes, dtype,
                       from + static_cast<std::size_t>(row) * stride, source_dtype,
                       static_cast<std::size_t>(contiguous ? count * k : k));
    }
    scatter_rows(panels, dtype, n, k, first_row + first, count, converted.data(), row_bytes);
  }
}

std::size_t PanelMatrix::bytes() const {
  if (is_compressed()) return compressed_bytes(n, k, outliers);
  return panel_bytes(quantization, dtype, n, k) * (is_stored_twice() ? 2 : 1);
}

std::size_t PanelMatrix::bytes_of_panels() const {
  if (is_compressed()) return compressed_bytes(n, k, outliers);
  Quantization in_order = quantization;
  in_order.act_order = false;
  return panel_bytes(in_order, dtype, n, k);
}

const std::byte* PanelMatrix::row(std::int64_t output) const {
  return data + panel_bytes(dtype, n, k) + static_cast<std::size_t>(output * k) * size_of(dtype);
}

const std::byte* PanelMatrix::column(std::int64_t input) const {
  return data + panel_bytes(dtype, n, k) + static_cast<std::size_t>(input * n) * size_of(dtype);
}

std::size_t PanelMatrix::offset(std::int64_t panel) const {
  if (is_compressed()) return static_cast<std::size_t>(panel) * compressed_panel_bytes(k, outliers);
  return panel_offset(quantization, dtype, k, panel);
}

void unpack_panel_row(const PanelMatrix& matrix, std::int64_t row, float* out) {
  if (matrix.is_compressed(row / kPanelColumns)) {
    unpack_compressed_row(matrix, row, out);
    return;
  }
  if (matrix.quantization.algo != QuantAlgo::kNone) {
    unpack_quantized_row(matrix, row, out);
    return;
  }
  switch (matrix.dtype) {
    case DType::kFloat32:
      gather_row<std::uint32_t, k_interleave(DType::kFloat32)>(matrix, row, out);
      break;
    case DType::kBFloat16:
      gather_row<std::uint16_t, k_interleave(DType::kBFloat16)>(matrix, row, out);
      break;
    case DType::kFloat16:
      gather_row<std::uint16_t, k_interleave(DType::kFloat16)>(matrix, row, out);
      break;
  }
}

float panel_element(const PanelMatrix& matrix, std::int64_t n, std::int64_t k) {
  const std::int64_t ki = k_interleave(matrix.dtype);
  const std::int64_t panel = n / kPanelColumns;
  const std::int64_t width = panel_width(matrix.n, panel);
  const std::int64_t element = ((k / ki) * width + n % kPanelColumns) * ki + k % ki;
  return load_as_float(matrix.data + panel_offset(matrix.dtype, matrix.k, panel), matrix.dtype,
                       static_cast<std::size_t>(element));
}

void unpack_panel_column(const PanelMatrix& matrix, std::int64_t k, float* out) {
  for (std::int64_t n = 0; n < matrix.n; ++n) out[n] = panel_element(matrix, n, k);
}

}  // namespace adaptrt
