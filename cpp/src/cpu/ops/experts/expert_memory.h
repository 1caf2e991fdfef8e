#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/program/program.h"
#include "ops/linear/row_groups.h"
#include "step.h"

namespace adaptrt {

/// Experts that a step's rows chose in an op; needed to compute the op's cost.
struct TakenExperts {
  /// Rows of one expert that have one adapter.
  struct Adapted {
    std::size_t expert = 0;
    const DeviceAdapter* adapter = nullptr;
    std::int64_t rows = 0;
  };
  std::vector<std::int64_t> rows;  ///< by local expert
  std::vector<Adapted> adapted;
};

/// Memory of the current ExpertsOp. The op processes its tokens in slices. A slice has one row for each token
/// and each of its experts, sorted by expert.
class ExpertMemory {
 public:
  /// Allocates memory for every ExpertsOp of the program; none if there is no such op.
  ExpertMemory(const Program& program, const KernelTable& kernels, int num_threads);

  // [slice tokens, top_k]
  std::vector<std::int32_t> chosen;         ///< experts of a token, ascending
  std::vector<float> weights;               ///< weights of these experts
  std::vector<std::int32_t> row_of;         ///< rows of the local experts
  std::vector<RowRange> here;               ///< [slice tokens] the local ones of a token's `chosen`
  std::vector<std::int32_t> token_of;       ///< by row: a token of the slice
  std::vector<float> weight_of;             ///< by row
  std::vector<float> factor_of;             ///< by row: factor of its input, if the routing scales inputs
  std::vector<std::int64_t> first_row;      ///< [local experts + 1]
  std::vector<RowGroup> experts_taken;      ///< experts with rows; first_part counts from the first local one
  std::vector<RowGroup> groups;             ///< the same with first_part of the current layer
  std::vector<AdapterGroup> adapters;       ///< rows by expert and adapter
  std::vector<std::size_t> adapter_expert;  ///< expert of each of `adapters`
  TakenExperts taken;
  std::vector<ThreadRows> packed_by_thread;  ///< an expert's inputs; empty if kernels read unpacked rows

  /// Activation type; rows are as wide as the op's. Both may be packed like StepMemory::packed.
  [[nodiscard]] std::byte* inputs() const { return inputs_.data(); }
  [[nodiscard]] std::byte* activated() const { return activated_.data(); }
  /// float32
  [[nodiscard]] std::byte* outputs() const { return outputs_.data(); }

 private:
  HugeArray inputs_;
  HugeArray activated_;
  HugeArray outputs_;
};

/// Tokens of a slice, at least 1.
[[nodiscard]] std::int64_t tokens_of_slice(const Program& program, const ExpertsOp& op);

}  // namespace adaptrt
