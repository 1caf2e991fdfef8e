#pragma once

#include <cstdint>
#include <span>

namespace adaptrt {

/// Maximum of StepInput::num_highest.
inline constexpr std::int32_t kMaxHighestLogits = 128;

/// A logit and its token. Logits are ordered from high to low, equal ones (-0 equals 0) by token.
struct TokenLogit {
  float logit = 0.0F;
  std::int32_t token = 0;
};

/// Facts about a whole row of logits.
struct RowSummary {
  /// The sum of exp_of_minus(max - logit) over the row, in the order of sum_of_exponentials()
  /// (sample/row_math.h), so that a device and the host find the same bits.
  double sum_of_exponentials = 0.0;
  float max = 0.0F;
  float min = 0.0F;  ///< of the finite logits
  /// The token of the highest logit, or a value of core/best_token.h. With such a value, nothing else of the
  /// row is valid.
  std::int32_t best_token = 0;
};

/// A row of which only the highest logits are known.
struct HighestLogits {
  RowSummary summary;
  std::span<const TokenLogit> highest;  ///< in their order
};

}  // namespace adaptrt
