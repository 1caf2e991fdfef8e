#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Rows [begin, end).
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t count() const { return end - begin; }
  [[nodiscard]] bool is_empty() const { return begin >= end; }
};

/// Rows with the same weights: LinearSpec::parts_per_group entries of LinearSpec::parts, from first_part on.
struct RowGroup {
  RowRange rows;
  std::size_t first_part = 0;
};

/// Consecutive rows of a linear layer with the same adapter, and the adapter's matrices.
struct AdaptedRows {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// For lm_head, the site of the first vocabulary slice; all slices have the same A.
  const DeviceSite* site = nullptr;
};

/// Rows of one group that a thread has packed.
struct ThreadRows {
  HugeArray memory;
  std::int64_t first_row = -1;  ///< index into the layer's rows
};

}  // namespace adaptrt
