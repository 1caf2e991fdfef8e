#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "adaptrt/sample/sampler.h"

namespace adaptrt {

Problems TokenConstraints::validate(std::int64_t vocab_size) const {
  Problems problems;
  const auto check_token = [&](const std::string& where, std::int32_t token) {
    if (token >= 0 && token < vocab_size) return;
    problems.add(where + " has token " + std::to_string(token) + "; the vocabulary has " +
                 std::to_string(vocab_size) + " tokens");
  };
  if (end_id) check_token("end_id", *end_id);
  for (const std::int32_t stop_id : stop_ids) check_token("stop_ids", stop_id);
  for (std::size_t i = 0; i < bad_words.size(); ++i) {
    const std::string name = "bad_words[" + std::to_string(i) + "]";
    if (bad_words[i].empty()) problems.add(name + " is empty");
    for (const std::int32_t token : bad_words[i]) check_token(name, token);
  }
  if (!embedding_bias) return problems;
  if (std::cmp_not_equal(embedding_bias->size(), vocab_size)) {
    problems.add("embedding_bias has " + std::to_string(embedding_bias->size()) +
                 " values; the vocabulary has " + std::to_string(vocab_size) + " tokens");
  }
  const auto unusable = std::ranges::find_if(
      *embedding_bias, [](float value) { return !(value < std::numeric_limits<float>::infinity()); });
  if (unusable != embedding_bias->end()) {
    problems.add("embedding_bias[" + std::to_string(unusable - embedding_bias->begin()) +
                 "] is NaN or +infinity");
  }
  return problems;
}

SamplerState::SamplerState(const SamplingParams& params, TokenConstraints constraints,
                           std::int32_t prompt_length, std::int32_t max_length,
                           std::int32_t vocabulary_change)
    : params_(params),
      constraints_(std::move(constraints)),
      prompt_length_(prompt_length),
      vocabulary_change_(vocabulary_change),
      top_p_(params.top_p),
      num_decayed_(static_cast<std::size_t>(prompt_length)) {
  if (has_penalties()) occurrences_.reserve(max_length);
}

bool SamplerState::has_penalties() const {
  return params_.repetition_penalty != 1.0 || params_.presence_penalty != 0.0 ||
         params_.frequency_penalty != 0.0;
}

bool SamplerState::forbids_end(std::size_t num_tokens) const {
  const auto num_generated = static_cast<std::int64_t>(num_tokens) - prompt_length_;
  return (constraints_.end_id || !constraints_.stop_ids.empty()) && num_generated < params_.min_tokens;
}

bool SamplerState::changes_logits(std::size_t num_tokens) const {
  return constraints_.embedding_bias || has_penalties() || !constraints_.bad_words.empty() ||
         params_.no_repeat_ngram_size != 0 || forbids_end(num_tokens);
}

std::optional<std::int32_t> SamplerState::num_highest_needed(std::size_t num_tokens) const {
  if (vocabulary_change_ != 0 || changes_logits(num_tokens)) return std::nullopt;
  if (params_.greedy) return 1;
  return params_.top_k > 0 ? std::optional(params_.top_k) : std::nullopt;
}

void SamplerState::follow(const SamplerState& other) {
  num_counted_ = other.num_counted_;
  top_p_ = other.top_p_;
  num_decayed_ = other.num_decayed_;
  occurrences_ = other.occurrences_;
}

double SamplerState::current_top_p(std::span<const std::int32_t> tokens) {
  if (params_.top_p_decay == 1.0 && params_.top_p_min <= params_.top_p) return params_.top_p;
  for (; num_decayed_ < tokens.size(); ++num_decayed_) {
    top_p_ = tokens[num_decayed_] == params_.top_p_reset_id
                 ? params_.top_p
                 : std::max(top_p_ * params_.top_p_decay, params_.top_p_min);
  }
  return top_p_;
}

void SamplerState::count_new_tokens(std::span<const std::int32_t> tokens) {
  if (num_counted_ < prompt_length_) {
    // The prompt counts only for the repetition penalty. Add all its tokens at once, because inserting one by
    // one is quadratic.
    if (params_.repetition_penalty != 1.0) {
      for (std::int32_t i = 0; i < prompt_length_; ++i) occurrences_.push_back({.token = tokens[i]});
      std::ranges::sort(occurrences_, {}, &Occurrence::token);
      // clang before version 16 cannot compile std::ranges::unique with GCC's library.
      const auto same_token = [](const Occurrence& a, const Occurrence& b) { return a.token == b.token; };
      occurrences_.erase(std::unique(occurrences_.begin(), occurrences_.end(), same_token),
                         occurrences_.end());
    }
    num_counted_ = prompt_length_;
  }
  for (; std::cmp_less(num_counted_, tokens.size()); ++num_counted_) {
    const std::int32_t token = tokens[num_counted_];
    auto place = std::ranges::lower_bound(occurrences_, token, {}, &Occurrence::token);
    if (place == occurrences_.end() || place->token != token)
      place = occurrences_.insert(place, {.token = token});
    ++place->times_generated;
  }
}

}  // namespace adaptrt
