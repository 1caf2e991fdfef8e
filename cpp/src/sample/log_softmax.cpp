#include "adaptrt/sample/log_softmax.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "row_math.h"

namespace adaptrt {
namespace {

/// Has no branch per element, so that compilers vectorise it.
bool has_above(std::span<const float> values, float bound) {
  std::uint32_t found = 0;
  for (const float value : values) found |= value > bound ? 1U : 0U;
  return found != 0;
}

}  // namespace

LogSoftmax::LogSoftmax(std::span<const float> logits) : LogSoftmax(logits, usable_range_of(logits).max) {}

LogSoftmax::LogSoftmax(std::span<const float> logits, float max)
    : logits_(logits), max_(max), log_sum_(std::log(sum_of_exponentials(logits, max))) {}

LogSoftmax::LogSoftmax(const RowSummary& row) : max_(row.max), log_sum_(std::log(row.sum_of_exponentials)) {}

float LogSoftmax::log_prob(std::int32_t token_id) const {
  return log_prob_of(logits_[static_cast<std::size_t>(token_id)]);
}

void LogSoftmax::log_probs(std::span<float> values) const {
  for (std::size_t i = 0; i < logits_.size(); ++i) {
    values[i] = static_cast<float>(double{logits_[i]} - double{max_} - log_sum_);
  }
}

void LogSoftmax::find_most_likely(std::span<TokenLogProb> most_likely) const {
  find_highest(logits_, most_likely);
  for (TokenLogProb& entry : most_likely) entry.log_prob = log_prob(entry.token_id);
}

void find_highest(std::span<const float> values, std::span<TokenLogProb> highest) {
  if (highest.empty()) return;
  std::size_t count = 0;
  // Indices are ascending, so a new index goes after equal values.
  const auto insert = [&](std::size_t index) {
    std::size_t place = count < highest.size() ? count++ : count - 1;
    for (; place > 0 && highest[place - 1].log_prob < values[index]; --place) {
      highest[place] = highest[place - 1];
    }
    highest[place] = {.token_id = static_cast<std::int32_t>(index), .log_prob = values[index]};
  };
  constexpr std::size_t kBlock = 256;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, values.size());
    if (count == highest.size() && !has_above(values.subspan(begin, end - begin), highest.back().log_prob)) {
      continue;
    }
    for (std::size_t i = begin; i < end; ++i) {
      if (count < highest.size() || values[i] > highest.back().log_prob) insert(i);
    }
  }
}

}  // namespace adaptrt
