#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/program/program.h"
#include "ops/linear/row_groups.h"

namespace adaptrt {

/// Rows of the current op of latent attention. The op processes its tokens in slices. A slice has one row for
/// each head and token, all tokens of a head after those of the head before.
class LatentMemory {
 public:
  /// Allocates memory for every such op of the program; none if there is no such op.
  explicit LatentMemory(const Program& program);

  std::vector<RowGroup> groups;  ///< the rows of each head

  /// Activation type; rows are as wide as a head's input.
  [[nodiscard]] std::byte* inputs() const { return inputs_.data(); }
  /// float32; rows are as wide as a head's output.
  [[nodiscard]] std::byte* outputs() const { return outputs_.data(); }

 private:
  HugeArray inputs_;
  HugeArray outputs_;
};

/// Tokens of a slice of an op with so many heads, at least 1.
[[nodiscard]] std::int64_t tokens_of_heads(const Program& program, std::int64_t num_heads);
/// Maximum number of rows of a slice; 0 if the program has no such op.
[[nodiscard]] std::int64_t most_latent_rows(const Program& program);

}  // namespace adaptrt
