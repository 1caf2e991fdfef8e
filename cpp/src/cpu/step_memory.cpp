#include "step_memory.h"

#include <algorithm>

#include "op_sizes.h"

namespace adaptrt {

StepMemory::StepMemory(const Program& program, const KernelTable& kernels, int num_threads)
    : arena(program.arena_bytes), experts(program, kernels, num_threads), latent(program) {
  const auto rows = static_cast<std::size_t>(most_linear_rows(program));
  if (!program.lora.sites.empty()) {
    shrink_stride = std::int64_t{program.lora.max_rank} * static_cast<std::int64_t>(kMaxPartsPerSite);
    shrink = HugeArray(rows * static_cast<std::size_t>(shrink_stride) * sizeof(float));
  }
  int8_stride = int8_row_bytes(program);
  if (int8_stride > 0) {
    // Kernels read whole blocks of rows.
    const std::size_t whole_blocks = rows + PackedSteps::kBlockRows - 1;
    int8_rows = HugeArray(whole_blocks * static_cast<std::size_t>(int8_stride));
    int8_scales_ = HugeArray(rows * sizeof(float));
    int8_sums_ = HugeArray(rows * static_cast<std::size_t>(most_w4a8_groups(program)) * sizeof(std::int32_t));
  }
  const PackedRowsSize packed_size = packed_rows_size(program, kernels);
  const PermutedSize permuted_rows = permuted_size(program);
  packed = HugeArray(static_cast<std::size_t>(packed_size.bytes() * (1 + permuted_rows.permutations)));
  packed_permutation_bytes = packed_size.bytes();
  const auto permutations = static_cast<std::size_t>(permuted_rows.permutations);
  permuted = HugeArray(permutations * rows * static_cast<std::size_t>(permuted_rows.row_bytes));
  const auto groups = static_cast<std::size_t>(most_summed_groups(program, kernels));
  if (groups > 0)
    group_sums_ = HugeArray(std::max<std::size_t>(1, permutations) * rows * groups * sizeof(float));
  int16_rows = Int16Rows(int16_row_size(program, kernels), std::max<std::size_t>(1, permutations) * rows);
  rank_room_floats_ = rank_room_floats(program);
  rank_room_ = HugeArray((rank_room_floats_ + low_rank_room_floats(program)) * sizeof(float));
  const std::size_t floats =
      std::max({linear_scratch_floats(program, kernels), attention_scratch_floats(program),
                row_op_scratch_floats(program), expert_scratch_floats(program)});
  for (int thread = 0; thread < num_threads; ++thread) scratch.emplace_back(floats);
  linear.adapter_panels.resize(static_cast<std::size_t>(num_threads));
  // Every group of rows may be one row.
  linear.blocks.reserve(rows);
  linear.task_ends.reserve(rows);
  linear.packed_begins.reserve(rows);
  linear.permutation_of_part.reserve(permuted_rows.parts);
  linear.adapted_rows.reserve(rows);
  linear.rows_by_a.reserve(rows);
  if (program.lora.max_extra_tokens > 0) linear.new_token_rows.reserve(rows);
}

}  // namespace adaptrt
