#include "adaptrt/sample/log_softmax.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "row_math.h"

namespace adaptrt {
namespace {

/// Without a branch an element, which compilers vectorise.
bool has_above(std::span<const float> values, float bound) {
  std::uint32_t found = 0;
  for (const float value : values) found |= value > bound ? 1U : 0U;
  return found != 0;
}

}  // namespace

LogSoftmax::LogSoftmax(std::span<const float> logits) : LogSoftmax(logits, usable_range_of(logits).max) {}

LogSoftmax::LogSoftmax(std::span<const float> logits, float max)
    : logits_(logits), max_(max), log_sum_(std::log(sum_of_exponentials(logits, max))) {}

float LogSoftmax::log_prob(std::int32_t token_id) const {
  const float logit = logits_[static_cast<std::size_t>(token_id)];
  return static_cast<float>(double{logit} - double{max_} - log_sum_);
}

void LogSoftmax::find_most_likely(std::span<TokenLogProb> most_likely) const {
  if (most_likely.empty()) return;
  const auto logit_of = [&](const TokenLogProb& entry) {
    return logits_[static_cast<std::size_t>(entry.token_id)];
  };
  std::size_t count = 0;
  // Tokens come in ascending order: behind those of equal logits is the right place.
  const auto insert = [&](std::size_t token) {
    std::size_t place = count < most_likely.size() ? count++ : count - 1;
    for (; place > 0 && logit_of(most_likely[place - 1]) < logits_[token]; --place) {
      most_likely[place] = most_likely[place - 1];
    }
    most_likely[place].token_id = static_cast<std::int32_t>(token);
  };
  constexpr std::size_t kBlock = 256;
  for (std::size_t begin = 0; begin < logits_.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, logits_.size());
    if (count == most_likely.size() &&
        !has_above(logits_.subspan(begin, end - begin), logit_of(most_likely.back()))) {
      continue;
    }
    for (std::size_t token = begin; token < end; ++token) {
      if (count < most_likely.size() || logits_[token] > logit_of(most_likely.back())) insert(token);
    }
  }
  for (TokenLogProb& entry : most_likely) entry.log_prob = log_prob(entry.token_id);
}

}  // namespace adaptrt
