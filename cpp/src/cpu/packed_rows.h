#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/cpu/kernel_table.h"

namespace adaptrt {

/// Rows in the form that KernelTable::pack_rows makes.
struct PackedRows {
  std::byte* data = nullptr;  ///< the first row; nullptr: the kernels read the rows themselves
  std::int64_t step_bytes = 0;

  [[nodiscard]] bool has_value() const { return data != nullptr; }
  /// The rows from row `index` on.
  [[nodiscard]] PackedRows from(std::int64_t index) const {
    return {data == nullptr ? nullptr : data + index * PackedSteps::kRowBytes, step_bytes};
  }
};

/// Bytes of a step with `blocks` blocks of packed rows. The number of blocks is made odd, because steps a
/// power of two apart would conflict in the cache.
[[nodiscard]] inline std::int64_t odd_step_bytes(std::int64_t blocks) {
  return (blocks | 1) * PackedSteps::kBlockRows * PackedSteps::kRowBytes;
}

/// Bytes of a step with `rows` packed rows, if a tile may begin at any row. It depends on the number of rows:
/// if few rows had the step size of many rows, each step would touch another page.
[[nodiscard]] inline std::int64_t packed_step_bytes(std::int64_t rows) {
  return odd_step_bytes(rows / PackedSteps::kBlockRows + 2);
}

/// Memory where an op packs its output for the next op, which then does not pack its input itself.
struct PackedPlace {
  std::byte* memory = nullptr;  ///< StepMemory::packed; nullptr: the output is not packed
  std::int64_t first_step = 0;  ///< another op uses the steps before it
  std::int64_t unpacked_rows = 0;

  /// The place of `rows` rows. It has no value if they are so few that the next op reads them unpacked.
  [[nodiscard]] PackedRows for_rows(std::int64_t rows) const {
    if (memory == nullptr || rows <= unpacked_rows) return {};
    const std::int64_t step_bytes = packed_step_bytes(rows);
    return {memory + first_step * step_bytes, step_bytes};
  }
};

}  // namespace adaptrt
