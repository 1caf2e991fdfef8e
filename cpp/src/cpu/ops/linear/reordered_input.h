#pragma once

#include <cstdint>

#include "context.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {

/// The input of a layer with act-order weights (Quantization::reordered), in the orders of their inputs:
/// StepMemory::reordered. Parts of a group that have the same order share it; the first part of a group has
/// order 0. Adapters read the input as it is.
class ReorderedInput {
 public:
  ReorderedInput(const LinearSpec& spec, const CpuContext& context) : spec_(spec), context_(context) {}

  /// Whether the layer has act-order weights. The rest is for such a layer.
  [[nodiscard]] bool is_needed() const { return spec_.quantization().reordered; }

  /// Notes which order each part reads, and returns how many orders there are. To be called before the rest.
  [[nodiscard]] std::int64_t find_orders(const LinearCall& call) const;

  /// Makes some of the rows, in all orders that their groups have.
  void make(const LinearCall& call, RowRange rows) const;

  /// The order that a part reads.
  [[nodiscard]] std::int64_t order_of(std::size_t part) const {
    return context_.memory.linear.order_of_part[part];
  }

  /// All rows in one order. Rows of groups without that order hold nothing of use.
  [[nodiscard]] Rows rows(const LinearCall& call, std::int64_t order) const {
    const std::int64_t bytes = call.num_rows() * call.input.row_bytes();
    return {context_.memory.reordered.data() + order * bytes, call.input.dtype, call.input.width};
  }

 private:
  const LinearSpec& spec_;
  const CpuContext& context_;
};

}  // namespace adaptrt
