#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

// Sizes of StepMemory that the ops of a program need.

/// Floats of scratch that a thread needs for a kind of op.
[[nodiscard]] std::size_t linear_scratch_floats(const Program& program, const KernelTable& kernels);
[[nodiscard]] std::size_t attention_scratch_floats(const Program& program);
[[nodiscard]] std::size_t row_op_scratch_floats(const Program& program);
[[nodiscard]] std::size_t expert_scratch_floats(const Program& program);

/// Maximum number of floats that an op receives from other ranks.
[[nodiscard]] std::size_t rank_room_floats(const Program& program);
/// Maximum number of floats that the exchange of an adapter site needs.
[[nodiscard]] std::size_t low_rank_room_floats(const Program& program);

/// Maximum number of rows of a linear layer: one for each token, for each row of logits, or for each row of a
/// slice of experts or of heads of latent attention.
[[nodiscard]] std::int64_t most_linear_rows(const Program& program);

/// Value for StepMemory::int8_stride; 0 if no weights round activations.
[[nodiscard]] std::int64_t int8_row_bytes(const Program& program);
/// Maximum number of groups of inputs in a matrix of QuantAlgo::kW4A8.
[[nodiscard]] std::int64_t most_w4a8_groups(const Program& program);
/// Maximum number of groups of inputs in a matrix whose products need sums of groups.
[[nodiscard]] std::int64_t most_summed_groups(const Program& program, const KernelTable& kernels);

/// Size of a row of 16-bit activations; 0 if no products read such rows.
struct Int16RowSize {
  std::int64_t inputs = 0;  ///< with padding
  std::int64_t spans = 0;
};
[[nodiscard]] Int16RowSize int16_row_size(const Program& program, const KernelTable& kernels);

/// Size of the packed rows of an input in one permutation.
struct PackedRowsSize {
  std::int64_t steps = 0;
  std::int64_t step_bytes = 0;

  [[nodiscard]] std::int64_t bytes() const { return steps * step_bytes; }
};
[[nodiscard]] PackedRowsSize packed_rows_size(const Program& program, const KernelTable& kernels);
/// Steps for the widest input, or for an input and an output that are packed at the same time.
[[nodiscard]] std::int64_t most_packed_steps(const Program& program);

/// Size of StepMemory::permuted.
struct PermutedSize {
  std::int64_t permutations = 0;  ///< maximum number of permutations of one row of a layer
  std::int64_t row_bytes = 0;
  std::size_t parts = 0;  ///< maximum number of parts of such a layer, with all its experts
};
[[nodiscard]] PermutedSize permuted_size(const Program& program);

}  // namespace adaptrt
