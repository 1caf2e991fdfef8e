#pragma once

#include <cstdint>
#include <span>

namespace adaptrt {

/// The largest and the smallest finite logit of a row.
struct LogitRange {
  float max = 0.0F;  ///< -infinity if no logit is finite; like min, never -0
  float min = 0.0F;
  bool has_nan_or_infinity = false;  ///< +infinity only; -infinity is the logit of a forbidden token
};

[[nodiscard]] LogitRange range_of(std::span<const float> logits);
/// The same for a row from the engine. Throws StepError if a logit is NaN or +infinity, or if all are
/// -infinity.
[[nodiscard]] LogitRange usable_range_of(std::span<const float> logits);

/// Index of the first element that equals `value`; it must exist.
[[nodiscard]] std::int64_t first_index_of(std::span<const float> values, float value);

/// weights[i] = exp((logits[i] - max) * scale), with a relative error below 1e-6; 0 below exp(-87). The same
/// bits on every machine, unlike std::exp.
void exponentiate(std::span<const float> logits, float max, float scale, std::span<float> weights);

/// The sum of exp(logits[i] - max): the sum()s of 256 logits each, added in order. A kernel computes the same
/// (cuda/kernels/rows/find_highest.cu).
[[nodiscard]] double sum_of_exponentials(std::span<const float> logits, float max);

/// The sum of weights[i] in one order. As long as there are sixteen more, each is added to a lane of its own.
/// The lanes are added in order, and then the rest.
[[nodiscard]] double sum(std::span<const float> weights);

}  // namespace adaptrt
