#pragma once

#include <cstdint>
#include <span>

#include "adaptrt/core/highest_logits.h"

namespace adaptrt {

struct TokenLogProb {
  std::int32_t token_id = 0;
  float log_prob = 0.0F;

  bool operator==(const TokenLogProb&) const = default;
};

/// Log probs under the model: natural logarithms of the softmax over a whole row of the engine's logits,
/// before bias, penalties, temperature and filters. Computed in double and rounded to float at the end. Every
/// log prob in a response comes from here, so a token always has the same bits.
class LogSoftmax {
 public:
  /// `logits` must outlive it. Throws StepError if a logit is NaN or +infinity, or if all are -infinity.
  explicit LogSoftmax(std::span<const float> logits);
  /// The same for logits that are known to be valid, with the maximum `max`.
  LogSoftmax(std::span<const float> logits, float max);
  /// The same for a row of which only facts are known, so that only log_prob_of() may be called.
  explicit LogSoftmax(const RowSummary& row);

  /// Returns -infinity for that logit.
  [[nodiscard]] float log_prob_of(float logit) const {
    return static_cast<float>(double{logit} - double{max_} - log_sum_);
  }
  /// Returns -infinity for a token with that logit.
  [[nodiscard]] float log_prob(std::int32_t token_id) const;
  /// Writes log_prob() of every token: one value per logit.
  void log_probs(std::span<float> values) const;
  /// Fills `most_likely`, which is at most as long as the row, with the highest logits in descending order;
  /// equal logits are ordered by token id.
  void find_most_likely(std::span<TokenLogProb> most_likely) const;

 private:
  std::span<const float> logits_;
  float max_;
  double log_sum_;
};

/// Fills `highest`, which is at most as long as `values`, with the highest values in descending order; equal
/// values are ordered by index. No value may be NaN.
void find_highest(std::span<const float> values, std::span<TokenLogProb> highest);

}  // namespace adaptrt
