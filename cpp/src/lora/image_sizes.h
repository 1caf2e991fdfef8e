#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/panels.h"
#include "adaptrt/lora/device_plan.h"
#include "adaptrt/lora/stored_matrix.h"

namespace adaptrt {

/// Rounds up to a multiple of kImageAlignment.
[[nodiscard]] inline std::size_t aligned_bytes(std::size_t bytes) {
  return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

[[nodiscard]] inline std::size_t vector_bytes(std::int64_t size) {
  return static_cast<std::size_t>(size) * sizeof(float);
}

/// Bytes of a matrix [rows, columns] in an image.
[[nodiscard]] inline std::size_t matrix_bytes(const LoraLayout& layout, std::int64_t rows,
                                              std::int64_t columns) {
  return layout.matrix_layout == MatrixLayout::kPanels
             ? panel_bytes(layout.dtype, rows, columns)
             : static_cast<std::size_t>(rows * columns) * size_of(layout.dtype);
}

/// A and a part's B of a placed image. If ranks share them, the sizes are those of the first rank, which are
/// the largest.
[[nodiscard]] inline StoredMatrix a_of(const LoraLayout& layout, const LoraSite& site,
                                       const DeviceSite& image) {
  return {image.a, image.a_storage, layout.dtype, site.rows_of_a(image.total_rank, 0).count, site.in_size};
}
[[nodiscard]] inline StoredMatrix b_of(const LoraLayout& layout, const LoraSite& site, std::size_t position,
                                       const DevicePart& part) {
  const std::int64_t rows = site.rows_of_b(site.parts[position].out_size, 0).count;
  return {part.b, part.b_storage, layout.dtype, rows, part.rank};
}

/// Bytes of a matrix in an image.
[[nodiscard]] inline std::size_t matrix_bytes(const LoraLayout& layout, const StoredMatrix& matrix) {
  return matrix.storage == LoraStorage::kExact ? matrix_bytes(layout, matrix.n, matrix.k) : matrix.bytes();
}

/// Index of a part in LoraSite::parts.
[[nodiscard]] inline std::size_t part_position(const LoraSite& site, LoraModule part) {
  return static_cast<std::size_t>(std::ranges::find(site.parts, part, &LoraPart::module) -
                                  site.parts.begin());
}

/// Orders a module's rows among those of the site: by the first of its parts.
[[nodiscard]] inline std::size_t module_position(const LoraSite& site, LoraModule module) {
  std::size_t first = site.parts.size();
  for (const LoraModule part : parts_of(module)) first = std::min(first, part_position(site, part));
  return first;
}

}  // namespace adaptrt
