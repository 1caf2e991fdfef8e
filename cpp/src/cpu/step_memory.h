#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/program/program.h"
#include "ops/experts.h"
#include "ops/linear_work.h"
#include "step.h"

namespace adaptrt {

/// Memory that the ops of a step work in, kept from step to step so that steps allocate nothing: what Step's
/// fields of the same names refer to, and say of it.
struct StepMemory {
  /// Room for every step of the program. Throws std::bad_alloc.
  StepMemory(const Program& program, const KernelTable& kernels, int num_threads);

  HugeArray arena;
  HugeArray shrink;
  std::int64_t shrink_stride = 0;
  HugeArray int8_rows;
  std::int64_t int8_stride = 0;
  HugeArray int8_scales;
  HugeArray int8_sums;
  HugeArray packed;
  std::int64_t packed_order_bytes = 0;
  HugeArray reordered;
  HugeArray group_sums;
  /// Step::low_rank_room behind rank_room_floats.
  HugeArray rank_room;
  std::size_t rank_room_floats = 0;
  std::vector<Scratch> scratch;  ///< by thread
  ExpertMemory experts;
  LinearScratch linear_scratch;
  std::vector<AdaptedRows> adapted_rows;
  std::vector<AdaptedRows> new_token_rows;
};

}  // namespace adaptrt
