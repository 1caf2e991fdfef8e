#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/linear/row_groups.h"

namespace adaptrt {

/// Memory of the linear layer that runs. It is kept from step to step, so that steps allocate nothing.
struct LinearScratch {
  std::vector<RowGroup> blocks;
  std::vector<std::int64_t> task_ends;
  /// For an exchange between ranks: where the rows of each of LinearCall::adapted begin.
  std::vector<std::int64_t> packed_begins;
  /// For a layer with act-order weights, by part: which of PermutedInput's orders it reads.
  std::vector<std::uint8_t> permutation_of_part;
  /// For sparse layers: the outputs or groups of inputs that are live, and both factors of a gated layer.
  std::vector<std::int32_t> live;
  /// Where the columns of live inputs begin.
  std::vector<const std::byte*> columns;
  std::vector<float> gates;
  std::vector<float> factors;
  /// How many outputs of the gate and of the last part, and how many inputs, the layer that ran has read;
  /// nullopt: all.
  std::optional<std::int64_t> gates_read = std::nullopt;
  std::optional<std::int64_t> outputs_read = std::nullopt;
  std::optional<std::int64_t> inputs_read = std::nullopt;
  std::vector<AdaptedRows> adapted_rows;
  std::vector<AdaptedRows> new_token_rows;

  void forget_reads() {
    gates_read.reset();
    outputs_read.reset();
    inputs_read.reset();
  }
};

}  // namespace adaptrt
