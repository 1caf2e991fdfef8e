#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "adaptrt/core/best_token.h"
#include "adaptrt/core/highest_logits.h"
#include "adaptrt/sample/log_softmax.h"
#include "sample/row_math.h"

namespace adaptrt::testing {

/// Finds on the host what an engine returns of a row (StepInput::highest). Allocates nothing.
inline RowSummary find_highest_logits(std::span<const float> row, std::span<TokenLogit> highest) {
  const LogitRange range = range_of(row);
  if (range.has_nan_or_infinity) return {.best_token = kUnusableLogits};
  if (!(range.max > -std::numeric_limits<float>::infinity())) return {.best_token = kEveryTokenForbidden};
  std::array<TokenLogProb, kMaxHighestLogits> found;
  const auto of_row = std::span(found).first(highest.size());
  find_highest(row, of_row);
  for (std::size_t i = 0; i < highest.size(); ++i) {
    highest[i] = {.logit = of_row[i].log_prob, .token = of_row[i].token_id};
  }
  return {.sum_of_exponentials = sum_of_exponentials(row, range.max),
          .max = range.max,
          .min = range.min,
          .best_token = of_row.front().token_id};
}

/// A row's highest logits, and the memory for them.
struct FoundHighest {
  FoundHighest(std::span<const float> row, std::size_t count)
      : highest(count), summary(find_highest_logits(row, highest)) {}
  [[nodiscard]] HighestLogits view() const { return {.summary = summary, .highest = highest}; }

  std::vector<TokenLogit> highest;
  RowSummary summary;
};

}  // namespace adaptrt::testing
