#pragma once

#include <cstdint>

#include "context.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {

/// The input of a layer with act-order weights (Quantization::act_order), in the permutations of their
/// inputs: StepMemory::permuted. Parts of a group with the same permutation share it; the first part of a
/// group has permutation 0. Adapters read the input without permutation.
class PermutedInput {
 public:
  PermutedInput(const LinearSpec& spec, const CpuContext& context) : spec_(spec), context_(context) {}

  /// True if the layer has act-order weights. Only then may the other functions be called.
  [[nodiscard]] bool is_needed() const { return spec_.quantization().act_order; }

  /// Finds the permutation that each part reads, and returns the number of permutations. Call it before the
  /// functions below.
  [[nodiscard]] std::int64_t find_permutations(const LinearCall& call) const;

  /// Permutes some of the rows, in all permutations of their groups.
  void make(const LinearCall& call, RowRange rows) const;

  /// Permutation that a part reads.
  [[nodiscard]] std::int64_t permutation_of(std::size_t part) const {
    return context_.memory.linear.permutation_of_part[part];
  }

  /// All rows in one permutation. Rows of groups without that permutation are undefined.
  [[nodiscard]] Rows rows(const LinearCall& call, std::int64_t permutation) const {
    const std::int64_t bytes = call.num_rows() * call.input.row_bytes();
    return {context_.memory.permuted.data() + permutation * bytes, call.input.dtype, call.input.width};
  }

 private:
  const LinearSpec& spec_;
  const CpuContext& context_;
};

}  // namespace adaptrt
