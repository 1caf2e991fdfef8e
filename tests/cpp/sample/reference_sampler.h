#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "adaptrt/sample/sampler.h"

namespace adaptrt::testing {

using Tokens = std::vector<std::int32_t>;
using Row = std::vector<float>;
inline constexpr float kForbidden = -std::numeric_limits<float>::infinity();

/// If a value is closer to top_p or min_p than this, float32 and float64 may differ for a token.
inline constexpr double kUndecided = 1e-5;

/// Reference for all sampling in float64, by sorting; nullopt if rounding decides.
class Reference {
 public:
  Reference(SamplingParams params, TokenConstraints constraints)
      : params_(params), constraints_(std::move(constraints)) {}

  [[nodiscard]] std::vector<double> process(const Row& logits, const Tokens& tokens,
                                            std::int32_t prompt_length) const {
    std::vector<double> row(logits.begin(), logits.end());
    if (constraints_.embedding_bias) {
      for (std::size_t i = 0; i < row.size(); ++i) row[i] += double{(*constraints_.embedding_bias)[i]};
    }
    for (std::int32_t v = 0; v < static_cast<std::int32_t>(row.size()); ++v) {
      const auto all = std::ranges::count(tokens, v);
      const auto generated = std::count(tokens.begin() + prompt_length, tokens.end(), v);
      if (all > 0)
        row[v] = row[v] > 0 ? row[v] / params_.repetition_penalty : row[v] * params_.repetition_penalty;
      if (generated > 0) row[v] -= params_.presence_penalty;
      row[v] -= params_.frequency_penalty * static_cast<double>(generated);
      if (is_forbidden(v, tokens, prompt_length)) row[v] = double{kForbidden};
    }
    return row;
  }

  [[nodiscard]] double top_p_after(const Tokens& tokens, std::int32_t prompt_length) const {
    double top_p = params_.top_p;
    for (auto at = static_cast<std::size_t>(prompt_length); at < tokens.size(); ++at) {
      top_p = tokens[at] == params_.top_p_reset_id ? params_.top_p
                                                   : std::max(top_p * params_.top_p_decay, params_.top_p_min);
    }
    return top_p;
  }

  [[nodiscard]] std::optional<std::map<std::int32_t, double>> distribution(const Row& logits,
                                                                           const Tokens& tokens,
                                                                           std::int32_t prompt_length) const {
    const std::vector<double> row = process(logits, tokens, prompt_length);
    Tokens order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](auto a, auto b) { return row[a] > row[b]; });
    if (params_.greedy) return {{{order[0], 1.0}}};
    if (params_.top_k > 0 && params_.top_k < static_cast<std::int32_t>(order.size()))
      order.resize(params_.top_k);
    std::map<std::int32_t, double> weight;
    double total = 0.0;
    for (const auto v : order) total += weight[v] = std::exp((row[v] - row[order[0]]) / params_.temperature);
    std::size_t kept = order.size();
    const double top_p = top_p_after(tokens, prompt_length);
    if (top_p < 1.0) {
      double share = 0.0;
      for (kept = 0; share < top_p && kept < order.size(); ++kept) {
        share += weight[order[kept]] / total;
        if (std::abs(share - top_p) < kUndecided) return std::nullopt;
      }
    }
    order.resize(kept);
    std::map<std::int32_t, double> result;
    double left = 0.0;
    for (const auto v : order) {
      if (std::abs(weight[v] - params_.min_p) < kUndecided * params_.min_p && v != order[0])
        return std::nullopt;
      if (weight[v] < params_.min_p || weight[v] < 1e-37) continue;
      result[v] = weight[v];
      left += weight[v];
    }
    for (auto& [token, probability] : result) probability /= left;
    return result;
  }

 private:
  [[nodiscard]] bool is_forbidden(std::int32_t v, Tokens tokens, std::int32_t prompt_length) const {
    const auto generated = static_cast<std::int32_t>(tokens.size()) - prompt_length;
    if (constraints_.end_id == v && generated < params_.min_tokens) return true;
    const auto past = tokens.size();
    tokens.push_back(v);
    const auto ends_with = [&](const Tokens& word) {
      return word.size() <= tokens.size() && std::equal(word.rbegin(), word.rend(), tokens.rbegin());
    };
    if (std::ranges::any_of(constraints_.bad_words, ends_with)) return true;
    const auto n = static_cast<std::size_t>(params_.no_repeat_ngram_size);
    if (n == 0) return false;
    for (std::size_t i = 0; i + n <= past; ++i) {
      const Tokens ngram(tokens.begin() + static_cast<std::ptrdiff_t>(i),
                         tokens.begin() + static_cast<std::ptrdiff_t>(i + n));
      if (ends_with(ngram)) return true;
    }
    return false;
  }

  SamplingParams params_;
  TokenConstraints constraints_;
};

inline Row random_row(std::mt19937_64& random, std::size_t size, bool with_ties) {
  std::normal_distribution<float> normal(0.0F, 3.0F);
  Row row(size);
  for (auto& logit : row) logit = with_ties ? std::round(normal(random)) : normal(random);
  return row;
}

}  // namespace adaptrt::testing
