#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/program/program.h"
#include "ops/linear/row_groups.h"
#include "step.h"

namespace adaptrt {

/// Which of an op's experts a step's rows took, for what they cost.
struct TakenExperts {
  /// Rows of one expert that have one adapter.
  struct Adapted {
    std::size_t expert = 0;
    const DeviceAdapter* adapter = nullptr;
    std::int64_t rows = 0;
  };
  std::vector<std::int64_t> rows;  ///< by expert, of those that are here
  std::vector<Adapted> adapted;
};

/// Memory of the ExpertsOp that runs. Its tokens are taken in slices: a row for each of a slice's tokens and
/// each of that token's experts, sorted by expert.
class ExpertMemory {
 public:
  /// Room for every ExpertsOp of the program; none without them.
  ExpertMemory(const Program& program, const KernelTable& kernels, int num_threads);

  // [slice tokens, top_k]
  std::vector<std::int32_t> chosen;     ///< experts of a token, ascending
  std::vector<float> weights;           ///< theirs
  std::vector<std::int32_t> row_of;     ///< of those that are here
  std::vector<RowRange> here;           ///< [slice tokens] which of a token's experts are
  std::vector<std::int32_t> token_of;   ///< by row: a token of the slice
  std::vector<float> weight_of;         ///< by row
  std::vector<std::int64_t> first_row;  ///< [experts that are here + 1]
  std::vector<RowGroup> experts_taken;  ///< those that have rows; first_part counts from the first one here
  std::vector<RowGroup> groups;         ///< the same with first_part of the layer that runs
  std::vector<AdapterGroup> adapters;   ///< rows by expert and adapter
  std::vector<std::size_t> adapter_expert;  ///< of each of them
  TakenExperts taken;
  std::vector<ThreadRows>
      packed_by_thread;  ///< an expert's inputs; empty where kernels read rows as they are

  /// Activation type; rows are as wide as the op's. Either may be PackedRows, as StepMemory::packed is.
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
