#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

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

/// This rank's A and a part's B of a placed image.
[[nodiscard]] inline StoredMatrix a_of(const LoraLayout& layout, const LoraSite& site,
                                       const DeviceSite& image) {
  return {image.a, image.a_storage, layout.dtype, site.rows_of_a(image.total_rank).count, site.in_size};
}
[[nodiscard]] inline StoredMatrix b_of(const LoraLayout& layout, const LoraSite& site, std::size_t position,
                                       const DevicePart& part) {
  const std::int64_t rows = site.rows_of_b(site.parts[position].out_size).count;
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

/// Bytes of the image of these modules at a site, if of_a(total rank, n, k) are those of A[n, k], and
/// of_b(index of the module, index of its part, n, k) those of a part's B[n, k]. If ranks share a matrix, n
/// is that of the first rank, which is the largest.
template <class OfA, class OfB>
[[nodiscard]] std::size_t image_bytes(const LoraSite& site, std::span<const ModuleRank> modules,
                                      const OfA& of_a, const OfB& of_b) {
  std::int64_t total_rank = 0;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    if (!modules[i].shares_a) total_rank += modules[i].rank;
    const auto parts = parts_of(modules[i].module);
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const std::int64_t out_size = site.parts[part_position(site, parts[part])].out_size;
      bytes += of_b(i, part, site.rows_of_b(out_size, 0).count, std::int64_t{modules[i].rank});
      bytes += static_cast<std::size_t>(modules[i].vectors.count()) * aligned_bytes(vector_bytes(out_size));
    }
  }
  return bytes + of_a(total_rank, site.rows_of_a(total_rank, 0).count, site.in_size);
}

/// Orders a module's rows among those of the site: by the first of its parts.
[[nodiscard]] inline std::size_t module_position(const LoraSite& site, LoraModule module) {
  std::size_t first = site.parts.size();
  for (const LoraModule part : parts_of(module)) first = std::min(first, part_position(site, part));
  return first;
}

}  // namespace adaptrt
