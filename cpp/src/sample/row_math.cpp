#include "row_math.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "adaptrt/core/error.h"
#include "adaptrt/core/exp_of_minus.h"
#include "adaptrt/sample/sampler.h"

namespace adaptrt {

namespace {

// Compilers turn loops over this many independent lanes into vector instructions. A reduction into one
// variable cannot be vectorised, because the order of floating-point operations matters.
constexpr std::size_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct HostArithmetic {
  static float product(float a, float b) { return a * b; }
  static float sum(float a, float b) { return a + b; }
  static float difference(float a, float b) { return a - b; }
  static std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }
  static float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
};

/// Which of -0 and 0 a search for the maximum finds depends on its order; 0 stands for both.
float without_sign_of_zero(float value) {
  return value == 0.0F ? 0.0F : value;
}

}  // namespace

LogitRange range_of(std::span<const float> logits) {
  std::array<float, kLanes> max;
  std::array<float, kLanes> min;
  std::array<std::uint32_t, kLanes> bad{};
  max.fill(-kInfinity);
  min.fill(kInfinity);
  const auto look_at = [&](float value, std::size_t lane) {
    max[lane] = value > max[lane] ? value : max[lane];
    const float finite = value == -kInfinity ? kInfinity : value;
    min[lane] = finite < min[lane] ? finite : min[lane];
    bad[lane] |= value < kInfinity ? 0U : 1U;
  };
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) look_at(logits[i + lane], lane);
  }
  for (; i < logits.size(); ++i) look_at(logits[i], 0);
  return {.max = without_sign_of_zero(*std::ranges::max_element(max)),
          .min = without_sign_of_zero(*std::ranges::min_element(min)),
          .has_nan_or_infinity = std::ranges::any_of(bad, [](std::uint32_t lane) { return lane != 0; })};
}

LogitRange usable_range_of(std::span<const float> logits) {
  const LogitRange range = range_of(logits);
  if (range.has_nan_or_infinity) throw StepError(kUnusableLogitsError);
  if (range.max == -kInfinity) throw StepError(kEveryTokenForbiddenError);
  return range;
}

std::int64_t first_index_of(std::span<const float> values, float value) {
  // First find the value's block, without a branch per element, so that compilers vectorise the loop.
  constexpr std::size_t kBlock = 256;
  std::size_t begin = 0;
  for (; begin < values.size(); begin += kBlock) {
    std::uint32_t found = 0;
    for (const float other : values.subspan(begin, std::min(kBlock, values.size() - begin))) {
      found |= other == value ? 1U : 0U;
    }
    if (found != 0) break;
  }
  const auto rest = values.subspan(std::min(begin, values.size()));
  return std::ranges::find(rest, value) - values.begin();
}

void exponentiate(std::span<const float> logits, float max, float scale, std::span<float> weights) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    weights[i] = exp_of_minus<HostArithmetic>((max - logits[i]) * scale);
  }
}

double sum_of_exponentials(std::span<const float> logits, float max) {
  constexpr std::size_t kChunk = 256;
  std::array<float, kChunk> weights;
  double total = 0.0;
  for (std::size_t i = 0; i < logits.size(); i += kChunk) {
    const auto chunk = logits.subspan(i, std::min(kChunk, logits.size() - i));
    exponentiate(chunk, max, 1.0F, weights);
    total += sum(std::span(weights).first(chunk.size()));
  }
  return total;
}

double sum(std::span<const float> weights) {
  std::array<double, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= weights.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += weights[i + lane];
  }
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  for (; i < weights.size(); ++i) total += weights[i];
  return total;
}

}  // namespace adaptrt
