#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Finds the rows of StepInput::prompt_embeddings by token. Tokens must be requested in order.
class GivenRows {
 public:
  GivenRows(const StepInput& input, std::int64_t first_token)
      : rows_(input.prompt_embedding_rows),
        embeddings_(input.prompt_embeddings),
        next_(static_cast<std::size_t>(std::ranges::lower_bound(rows_, first_token) - rows_.begin())) {}

  /// Returns nullptr for a token without a row.
  [[nodiscard]] const float* of(std::int64_t token) {
    while (next_ < rows_.size() && rows_[next_] < token) ++next_;
    return next_ < rows_.size() && rows_[next_] == token ? embeddings_[next_] : nullptr;
  }

 private:
  std::span<const std::int32_t> rows_;
  std::span<const float* const> embeddings_;
  std::size_t next_;
};

}  // namespace adaptrt
