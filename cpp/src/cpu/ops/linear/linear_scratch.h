#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/linear/row_groups.h"

namespace adaptrt {

/// Memory of the current linear layer. Steps reuse it, so they allocate nothing.
struct LinearScratch {
  std::vector<RowGroup> blocks;
  std::vector<std::int64_t> task_ends;
  /// For an exchange between ranks: offset of the rows of each of LinearCall::adapted.
  std::vector<std::int64_t> packed_begins;
  /// For a layer with act-order weights: the permutation of PermutedInput that each part reads.
  std::vector<std::uint8_t> permutation_of_part;
  /// For sparse layers: the live outputs or groups of inputs, and both factors of a gated layer.
  std::vector<std::int32_t> live;
  /// Addresses of the columns of live inputs.
  std::vector<const std::byte*> columns;
  std::vector<float> gates;
  std::vector<float> factors;
  /// Numbers of outputs of the gate and of the last part, and of inputs, that the last layer has read;
  /// nullopt: all.
  std::optional<std::int64_t> gates_read = std::nullopt;
  std::optional<std::int64_t> outputs_read = std::nullopt;
  std::optional<std::int64_t> inputs_read = std::nullopt;
  std::vector<AdaptedRows> adapted_rows;
  std::vector<AdaptedRows> rows_by_a;
  std::vector<AdaptedRows> new_token_rows;
  /// By thread: an expanded panel of an adapter that is not stored exactly, and sums of its product. Grows
  /// when it is needed.
  std::vector<HugeArray> adapter_panels;

  void forget_reads() {
    gates_read.reset();
    outputs_read.reset();
    inputs_read.reset();
  }
};

}  // namespace adaptrt
