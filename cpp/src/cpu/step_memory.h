#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/program/program.h"
#include "int16_rows.h"
#include "ops/experts/expert_memory.h"
#include "ops/latent_memory.h"
#include "ops/linear/linear_scratch.h"
#include "packed_rows.h"

namespace adaptrt {

/// Memory of one thread; one op uses it at a time.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(std::size_t floats) : memory_(floats * sizeof(float)) {}
  [[nodiscard]] float* data() const { return reinterpret_cast<float*>(memory_.data()); }

 private:
  HugeArray memory_;
};

/// Memory of the ops of a step. Steps reuse it, so they allocate nothing.
class StepMemory {
 public:
  /// Allocates room for every step of the program. Throws std::bad_alloc.
  StepMemory(const Program& program, const KernelTable& kernels, int num_threads);

  /// The program's buffers.
  HugeArray arena;
  /// Activation type [rows, shrink_stride]: x A^T of the current linear layer.
  HugeArray shrink;
  std::int64_t shrink_stride = 0;
  /// uint8 [rows, int8_stride]: the current linear layer's input for weights that round activations, as
  /// KernelTable::quantize_row writes it. For QuantAlgo::kW4A8, arrange_int8_row has changed it.
  HugeArray int8_rows;
  std::int64_t int8_stride = 0;
  Int16Rows int16_rows;
  /// The current linear layer's input, packed by KernelTable::pack_rows. Each of `permuted` follows,
  /// packed_permutation_bytes apart. Empty if the kernels read unpacked rows.
  HugeArray packed;
  std::int64_t packed_permutation_bytes = 0;
  /// Activation type [permutations, rows, inputs]: the current linear layer's input in the permutations of
  /// its weights; see PermutedInput.
  HugeArray permuted;
  std::vector<Scratch> scratch;  ///< by thread; see the scratch sizes in op_sizes.h
  ExpertMemory experts;
  LatentMemory latent;
  LinearScratch linear;

  /// float32 [rows]: the scales of int8_rows.
  [[nodiscard]] float* int8_scales() const { return reinterpret_cast<float*>(int8_scales_.data()); }
  /// int32 [rows, groups]: the sums that arrange_int8_row computes.
  [[nodiscard]] std::int32_t* int8_sums() const { return reinterpret_cast<std::int32_t*>(int8_sums_.data()); }
  [[nodiscard]] std::uint8_t* int8_row(std::int64_t row) const {
    return reinterpret_cast<std::uint8_t*>(int8_rows.data()) + row * int8_stride;
  }
  /// float32 [permutations, rows, groups]: sums of the input's groups, from KernelTable::sum_groups; for
  /// weights with zero points.
  [[nodiscard]] float* group_sums() const { return reinterpret_cast<float*>(group_sums_.data()); }
  /// Memory for rows of other ranks; see rank_room_floats().
  [[nodiscard]] float* rank_room() const { return reinterpret_cast<float*>(rank_room_.data()); }
  /// Memory for the exchanges of linear ops while a sum is in progress; see low_rank_room_floats().
  [[nodiscard]] float* low_rank_room() const { return rank_room() + rank_room_floats_; }
  /// True if kernels read packed rows.
  [[nodiscard]] bool has_packed() const { return packed.data() != nullptr; }
  [[nodiscard]] PackedRows packed_for(std::int64_t num_rows) const {
    return {packed.data(), packed_step_bytes(num_rows)};
  }

 private:
  HugeArray int8_scales_;
  HugeArray int8_sums_;
  HugeArray group_sums_;
  HugeArray rank_room_;
  std::size_t rank_room_floats_ = 0;
};

}  // namespace adaptrt
