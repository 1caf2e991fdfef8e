#pragma once

#include <cstdint>
#include <span>

namespace adaptrt {

struct TokenLogProb {
  std::int32_t token_id = 0;
  float log_prob = 0.0F;

  bool operator==(const TokenLogProb&) const = default;
};

/// Log probs under the model: natural logarithms of the softmax over a whole row of logits as the engine made
/// it, before bias, penalties, temperature and filters. Computed in double, rounded to float at the end.
/// Every log prob that a request returns is from here, so a token has the same bits wherever it appears.
class LogSoftmax {
 public:
  /// `logits` outlive it. Throws StepError when one is NaN or +infinity, or all are -infinity.
  explicit LogSoftmax(std::span<const float> logits);
  /// The same of logits that are known to be usable, the highest of which is `max`.
  LogSoftmax(std::span<const float> logits, float max);

  /// -infinity for a token whose logit is.
  [[nodiscard]] float log_prob(std::int32_t token_id) const;
  /// log_prob() of every token: as many values as there are logits.
  void log_probs(std::span<float> values) const;
  /// Fills `most_likely`, at most as long as the row: descending logits, of equal ones the lowest token id
  /// first.
  void find_most_likely(std::span<TokenLogProb> most_likely) const;

 private:
  std::span<const float> logits_;
  float max_;
  double log_sum_;
};

/// Fills `highest`, at most as long as `values`, with descending values, of equal ones the lowest index
/// first. None is NaN.
void find_highest(std::span<const float> values, std::span<TokenLogProb> highest);

}  // namespace adaptrt
