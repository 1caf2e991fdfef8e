#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/linear_work.h"
#include "step.h"

namespace adaptrt {

/// The input of a layer whose weights are reordered (Quantization::reordered), in the orders of their inputs:
/// Step::reordered. Parts of a group that have the same order share what is made; the first of a group has
/// order 0. Adapters read the input as it is.
class ReorderedInput {
 public:
  ReorderedInput(const LinearWork& work, const Step& step) : work_(work), step_(step) {}

  /// Whether the layer's weights are reordered. What follows is for such a one.
  [[nodiscard]] bool is_needed() const { return work_.quantization().reordered; }

  /// Notes which order each part reads, and returns how many there are. Before the rest.
  [[nodiscard]] std::int64_t find_orders() const;

  /// Makes some of the rows, in all orders that their groups have.
  void make(RowRange rows) const;

  /// The one that a part reads.
  [[nodiscard]] std::int64_t order_of(std::size_t part) const {
    return step_.linear_scratch.order_of_part[part];
  }

  /// All rows in one order. Those of groups without that order hold nothing of use.
  [[nodiscard]] Rows rows(std::int64_t order) const {
    const std::int64_t bytes = work_.num_rows() * work_.input.row_bytes();
    return {step_.reordered + order * bytes, work_.input.dtype, work_.input.width};
  }

 private:
  const LinearWork& work_;
  const Step& step_;
};

}  // namespace adaptrt
