#include "adaptrt/cpu/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace adaptrt {
namespace {

constexpr float kTaken = -std::numeric_limits<float>::infinity();

/// Compares scores; NaN is smaller than every number.
bool is_larger(float value, float other) {
  return value > other || (std::isnan(other) && !std::isnan(value));
}

/// Position of the largest of `values`; of equal ones, the first.
std::size_t position_of_largest(std::span<const float> values) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < values.size(); ++i) {
    if (is_larger(values[i], values[best])) best = i;
  }
  return best;
}

/// Positions of the largest of `values`, the largest first; of equal ones, the first come first.
void find_largest(std::span<const float> values, std::span<std::int32_t> positions) {
  const auto value_at = [&](std::size_t place) { return values[static_cast<std::size_t>(positions[place])]; };
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t found = std::min(i, positions.size());
    if (found == positions.size() && !is_larger(values[i], value_at(found - 1))) continue;
    std::size_t place = std::min(found, positions.size() - 1);
    for (; place > 0 && is_larger(values[i], value_at(place - 1)); --place)
      positions[place] = positions[place - 1];
    positions[place] = static_cast<std::int32_t>(i);
  }
}

void softmax(const KernelTable& kernels, std::span<float> values) {
  const float largest = values[position_of_largest(values)];
  for (float& value : values) value -= largest;
  kernels.exp(values.data(), static_cast<std::int64_t>(values.size()), values.data());
  float sum = 0.0F;
  for (const float value : values) sum += value;
  for (float& value : values) value /= sum;
}

/// Sum of the two largest values of a group, or the largest one `by_best` and for a group of one.
float strength_of(std::span<const float> group, bool by_best) {
  const std::size_t best = position_of_largest(group);
  if (by_best || group.size() == 1) return group[best];
  float second = kTaken;
  for (std::size_t i = 0; i < group.size(); ++i) {
    if (i != best) second = std::max(second, group[i]);
  }
  return group[best] + second;
}

/// Excludes all experts except those of the best `topk_groups` groups.
void drop_groups(const Routing& routing, std::span<float> choice, std::span<float> strengths) {
  const std::size_t size = choice.size() / strengths.size();
  for (std::size_t i = 0; i < strengths.size(); ++i)
    strengths[i] = strength_of(choice.subspan(i * size, size), routing.rates_groups_by_best);
  for (std::int32_t taken = 0; taken < routing.topk_groups; ++taken) {
    strengths[position_of_largest(strengths)] = std::numeric_limits<float>::quiet_NaN();
  }
  for (std::size_t i = 0; i < strengths.size(); ++i) {
    if (!std::isnan(strengths[i])) std::ranges::fill(choice.subspan(i * size, size), kTaken);
  }
}

}  // namespace

std::int64_t routing_scratch_floats(const ExpertsOp& op) {
  return 2 * op.num_experts() + op.routing.num_groups;
}

void route_token(const ExpertsOp& op, const KernelTable& kernels, const float* logits, float* scratch,
                 std::int32_t* chosen, float* weights) {
  const Routing& routing = op.routing;
  const auto experts = static_cast<std::size_t>(op.num_experts());
  const auto top_k = static_cast<std::size_t>(routing.top_k);
  const std::span scores(scratch, experts);
  const std::span choice(scratch + experts, experts);
  std::copy_n(logits, experts, scores.data());
  if (routing.scores == RouterScores::kSoftmax) softmax(kernels, scores);
  if (routing.scores == RouterScores::kSigmoid) {
    for (float& score : scores) score = 1.0F / (1.0F + std::exp(-score));
  }
  for (std::size_t i = 0; i < experts; ++i) {
    choice[i] = scores[i] + (routing.bias.size == 0 ? 0.0F : routing.bias.data[i]);
  }
  if (routing.num_groups > 1) {
    drop_groups(routing, choice, {choice.data() + experts, static_cast<std::size_t>(routing.num_groups)});
  }
  find_largest(choice, {chosen, top_k});
  std::sort(chosen, chosen + top_k);
  for (std::size_t i = 0; i < top_k; ++i) weights[i] = scores[static_cast<std::size_t>(chosen[i])];
  if (routing.scores == RouterScores::kSoftmaxOfChosen) softmax(kernels, {weights, top_k});
  if (routing.norm_topk_prob) {
    constexpr float kLeast = 1e-20F;  // all sigmoids may be zero
    float sum = kLeast;
    for (std::size_t i = 0; i < top_k; ++i) sum += weights[i];
    for (std::size_t i = 0; i < top_k; ++i) weights[i] /= sum;
  }
  for (std::size_t i = 0; i < top_k; ++i) weights[i] *= routing.scale;
  for (std::size_t i = 0; i < top_k && routing.expert_scale.size != 0; ++i) {
    weights[i] *= routing.expert_scale.data[chosen[i]];
  }
}

}  // namespace adaptrt
