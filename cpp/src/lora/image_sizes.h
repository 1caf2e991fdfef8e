#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/panels.h"
#include "adaptrt/lora/device_plan.h"

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
