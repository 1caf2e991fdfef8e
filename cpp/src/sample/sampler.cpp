#include "adaptrt/sample/sampler.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include "adaptrt/core/best_token.h"
#include "adaptrt/sample/philox.h"
#include "row_math.h"

namespace adaptrt {

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr std::size_t kNumBuckets = 1024;

/// Returns the index that a draw `uniform` selects, if each index has its weight's share of [0, 1) in order.
std::size_t index_at(std::span<const float> weights, double uniform) {
  constexpr std::size_t kChunk = 512;
  double total = 0.0;
  for (std::size_t i = 0; i < weights.size(); i += kChunk) {
    total += sum(weights.subspan(i, std::min(kChunk, weights.size() - i)));
  }
  const double target = uniform * total;
  double below = 0.0;
  std::size_t last_possible = 0;
  for (std::size_t i = 0; i < weights.size(); i += kChunk) {
    const auto chunk = weights.subspan(i, std::min(kChunk, weights.size() - i));
    const double with_chunk = below + sum(chunk);
    if (with_chunk > target) {
      for (std::size_t k = 0; k < chunk.size(); ++k) {
        if (chunk[k] == 0.0F) continue;
        last_possible = i + k;
        below += chunk[k];
        if (below > target) break;
      }
      return last_possible;
    }
    below = with_chunk;
  }
  return last_possible;
}

/// Upper bounds of four logits for each value of their four mask bits: infinity if the bit is set, otherwise
/// -infinity. A table, because shifts by the lane's number prevent vectorisation.
constexpr auto kCeilings = [] {
  std::array<std::array<float, 4>, 16> ceilings{};
  for (std::size_t bits = 0; bits < ceilings.size(); ++bits) {
    for (std::size_t bit = 0; bit < 4; ++bit) {
      ceilings[bits][bit] = (bits >> bit & 1U) != 0 ? std::numeric_limits<float>::infinity() : kForbidden;
    }
  }
  return ceilings;
}();

/// Forbids those of at most 32 logits whose mask bit is clear.
void forbid_some(std::uint32_t allowed, std::span<float> logits) {
  for (; logits.size() >= 4; logits = logits.subspan(4), allowed >>= 4) {
    const auto& ceilings = kCeilings[allowed & 15U];
    // NaN becomes the bound: -infinity if the token is forbidden, otherwise infinity, which is reported as an
    // error.
    for (std::size_t i = 0; i < 4; ++i) logits[i] = logits[i] < ceilings[i] ? logits[i] : ceilings[i];
  }
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if ((allowed >> i & 1U) == 0) logits[i] = kForbidden;
  }
}

}  // namespace

Sampler::Buckets::Buckets(float highest, float lowest) : max(highest) {
  const float range = std::min(highest - lowest, kLargest);
  constexpr auto kCount = static_cast<float>(kNumBuckets);
  // Finite, so that the highest value gives bucket 0.
  scale = range > kCount / kLargest ? kCount / range : kLargest;
}

std::size_t Sampler::Buckets::of(float value) const {
  const float distance = std::min(max - value, kLargest);
  return static_cast<std::size_t>(std::min(distance * scale, static_cast<float>(kNumBuckets - 1)));
}

Sampler::Sampler(std::int64_t vocab_size, std::int64_t max_new_tokens) : vocab_size_(vocab_size) {
  if (vocab_size < 1) throw ConfigError("the vocabulary has " + std::to_string(vocab_size) + " tokens");
  const auto size = static_cast<std::size_t>(vocab_size + max_new_tokens);
  processed_.resize(size);
  values_.resize(size);
  weights_.resize(size);
  ids_.resize(size);
  bucket_.reserve(size);
  bucket_counts_.resize(kNumBuckets);
  bucket_weights_.resize(kNumBuckets);
  by_token_.reserve(kMaxHighestLogits);
}

SampledToken Sampler::sample(SamplerState& state, const float* logits, std::span<const std::int32_t> tokens,
                             bool want_log_prob, std::span<TokenLogProb> most_likely,
                             const RowChanges& changes) {
  const std::span raw(logits, row_size(state));
  const LogitRange raw_range = usable_range_of(raw);
  const ProcessedRow row = changes.logits == nullptr
                               ? process(state, raw_range, logits, tokens, changes.allowed)
                               : process(state, range_of(std::span(changes.logits, raw.size())),
                                         changes.logits, tokens, changes.allowed);
  const SamplingParams& params = state.params();
  SampledToken result;
  if (params.greedy) {
    result.token = static_cast<std::int32_t>(first_index_of(row.logits, row.max));
  } else {
    result.token = draw(state, filter(params, state.current_top_p(tokens), row), tokens.size());
  }
  if (want_log_prob || !most_likely.empty()) {
    const LogSoftmax softmax(raw, raw_range.max);
    if (want_log_prob) result.log_prob = softmax.log_prob(result.token);
    softmax.find_most_likely(most_likely);
  }
  return result;
}

SampledToken Sampler::sample(SamplerState& state, const HighestLogits& row,
                             std::span<const std::int32_t> tokens, bool want_log_prob,
                             std::span<TokenLogProb> most_likely) {
  const RowSummary& summary = row.summary;
  if (summary.best_token == kUnusableLogits) throw StepError(kUnusableLogitsError);
  if (summary.best_token == kEveryTokenForbidden) throw StepError(kEveryTokenForbiddenError);
  const SamplingParams& params = state.params();
  SampledToken result;
  if (params.greedy) {
    result.token = summary.best_token;
  } else {
    const auto count = std::min(row.highest.size(), static_cast<std::size_t>(params.top_k));
    by_token_.assign(row.highest.begin(), row.highest.begin() + static_cast<std::ptrdiff_t>(count));
    std::ranges::sort(by_token_, {}, &TokenLogit::token);
    for (std::size_t i = 0; i < count; ++i) {
      ids_[i] = by_token_[i].token;
      values_[i] = by_token_[i].logit;
    }
    const Candidates candidates = filter_by_probability(
        params, state.current_top_p(tokens), Buckets(summary.max, summary.min),
        {.values = std::span(values_).first(count), .ids = std::span(ids_).first(count)});
    result.token = draw(state, candidates, tokens.size());
  }
  if (!want_log_prob && most_likely.empty()) return result;
  const LogSoftmax softmax(summary);
  if (want_log_prob) {
    result.log_prob =
        softmax.log_prob_of(std::ranges::find(row.highest, result.token, &TokenLogit::token)->logit);
  }
  for (std::size_t i = 0; i < most_likely.size(); ++i) {
    most_likely[i] = {.token_id = row.highest[i].token,
                      .log_prob = softmax.log_prob_of(row.highest[i].logit)};
  }
  return result;
}

std::int32_t Sampler::draw(const SamplerState& state, const Candidates& candidates, std::size_t num_tokens) {
  const double uniform =
      uniform_draw(state.params().seed, num_tokens - static_cast<std::size_t>(state.prompt_length_));
  return candidates.token(index_at(candidates.weights, uniform));
}

std::vector<TokenProbability> Sampler::distribution(SamplerState& state, const float* logits,
                                                    std::span<const std::int32_t> tokens) {
  const LogitRange range = usable_range_of(std::span(logits, row_size(state)));
  const ProcessedRow row = process(state, range, logits, tokens, {});
  if (state.params().greedy) return {{static_cast<std::int32_t>(first_index_of(row.logits, row.max)), 1.0}};
  const Candidates candidates = filter(state.params(), state.current_top_p(tokens), row);
  const double total = sum(candidates.weights);
  std::vector<TokenProbability> result;
  for (std::size_t i = 0; i < candidates.weights.size(); ++i) {
    if (candidates.weights[i] == 0.0F) continue;
    result.push_back({candidates.token(i), double{candidates.weights[i]} / total});
  }
  return result;
}

Sampler::ProcessedRow Sampler::process(SamplerState& state, const LogitRange& range, const float* logits,
                                       std::span<const std::int32_t> tokens,
                                       std::span<const std::uint32_t> allowed) {
  const std::span processed(apply_constraints(state, logits, tokens, allowed), row_size(state));
  const LogitRange new_range = processed.data() == logits ? range : range_of(processed);
  if (new_range.has_nan_or_infinity) {
    throw StepError("bias, penalties or a post-processor have made logits NaN or infinity");
  }
  if (new_range.max == kForbidden) throw StepError(kEveryTokenForbiddenError);
  return {.logits = processed, .max = new_range.max, .min = new_range.min};
}

const float* Sampler::apply_constraints(SamplerState& state, const float* logits,
                                        std::span<const std::int32_t> tokens,
                                        std::span<const std::uint32_t> allowed) {
  const SamplingParams& params = state.params();
  const TokenConstraints& constraints = state.constraints();
  if (!state.changes_logits(tokens.size()) && allowed.empty()) return logits;
  const std::span row = std::span(processed_).first(row_size(state));
  std::copy_n(logits, row.size(), row.begin());
  if (constraints.embedding_bias) {
    const std::vector<float>& bias = *constraints.embedding_bias;
    for (std::size_t i = 0; i < row.size(); ++i) row[i] += bias[i];
  }
  if (state.has_penalties()) {
    state.count_new_tokens(tokens);
    apply_penalties(state);
  }
  forbid_bad_words(constraints, tokens);
  if (params.no_repeat_ngram_size > 0) forbid_repeated_ngrams(params.no_repeat_ngram_size, tokens, row);
  if (state.forbids_end(tokens.size())) {
    if (constraints.end_id) processed_[*constraints.end_id] = kForbidden;
    for (const std::int32_t stop_id : constraints.stop_ids) processed_[stop_id] = kForbidden;
  }
  forbid_all_but(allowed, row);
  return processed_.data();
}

void Sampler::apply_penalties(const SamplerState& state) {
  const auto repetition = static_cast<float>(state.params().repetition_penalty);
  const auto presence = static_cast<float>(state.params().presence_penalty);
  const auto frequency = static_cast<float>(state.params().frequency_penalty);
  for (const auto& occurrence : state.occurrences_) {
    if (std::cmp_greater_equal(occurrence.token, row_size(state))) break;  // virtual tokens of the prompt
    float& logit = processed_[occurrence.token];
    logit = logit > 0.0F ? logit / repetition : logit * repetition;
    if (occurrence.times_generated == 0) continue;
    logit -= presence + frequency * static_cast<float>(occurrence.times_generated);
  }
}

void Sampler::forbid_bad_words(const TokenConstraints& constraints, std::span<const std::int32_t> tokens) {
  for (const auto& word : constraints.bad_words) {
    const auto beginning = std::span(word).first(word.size() - 1);
    if (beginning.size() > tokens.size() || !std::ranges::equal(tokens.last(beginning.size()), beginning))
      continue;
    processed_[word.back()] = kForbidden;
  }
}

void Sampler::forbid_repeated_ngrams(std::int32_t size, std::span<const std::int32_t> tokens,
                                     std::span<float> row) {
  const auto length = static_cast<std::size_t>(size);
  if (tokens.size() < length) return;
  const auto newest = tokens.last(length - 1);
  for (std::size_t i = 0; i + length <= tokens.size(); ++i) {
    const auto next = static_cast<std::size_t>(tokens[i + length - 1]);
    // Virtual tokens are never sampled.
    if (next < row.size() && std::ranges::equal(tokens.subspan(i, length - 1), newest))
      row[next] = kForbidden;
  }
}

void Sampler::forbid_all_but(std::span<const std::uint32_t> allowed, std::span<float> row) {
  if (allowed.empty()) return;
  const std::size_t known = std::min(static_cast<std::size_t>(vocab_size_), row.size());
  std::ranges::fill(row.subspan(known), kForbidden);
  row = row.first(known);
  constexpr std::size_t kBits = 32;
  for (std::size_t i = 0; i * kBits < row.size(); ++i) {
    if (allowed[i] == ~std::uint32_t{0}) continue;
    const std::span rest = row.subspan(i * kBits);
    const std::span logits = rest.first(std::min(kBits, rest.size()));
    if (allowed[i] == 0) {
      std::ranges::fill(logits, kForbidden);
    } else {
      forbid_some(allowed[i], logits);
    }
  }
}

template <typename Keep>
Sampler::Remaining Sampler::keep_if(const Remaining& remaining, const Keep& keep) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < remaining.values.size(); ++i) {
    if (!keep(i)) continue;
    ids_[kept] = remaining.ids.empty() ? static_cast<std::int32_t>(i) : remaining.ids[i];
    values_[kept] = remaining.values[i];
    weights_[kept] = weights_[i];
    ++kept;
  }
  return {.values = std::span(values_).first(kept), .ids = std::span(ids_).first(kept)};
}

Sampler::Remaining Sampler::keep_up_to(const Remaining& remaining, const Place& last) {
  return keep_if(remaining, [&](std::size_t i) {
    return !last.is_before({remaining.values[i], static_cast<std::int64_t>(i)});
  });
}

Sampler::Candidates Sampler::filter(const SamplingParams& params, double top_p, const ProcessedRow& row) {
  const Buckets buckets(row.max, row.min);
  Remaining remaining{.values = row.logits};
  if (params.top_k > 0 && std::cmp_less(params.top_k, row.logits.size())) {
    remaining = keep_up_to(remaining, place_of_rank(row.logits, buckets, params.top_k));
  }
  return filter_by_probability(params, top_p, buckets, remaining);
}

Sampler::Candidates Sampler::filter_by_probability(const SamplingParams& params, double top_p,
                                                   const Buckets& buckets, Remaining remaining) {
  // Positive and finite, so that -infinity stays -infinity and 0 stays 0.
  const auto scale = static_cast<float>(
      std::clamp(1.0 / params.temperature, double{std::numeric_limits<float>::min()}, double{kLargest}));
  const std::span<float> weights(weights_);
  exponentiate(remaining.values, buckets.max, scale, weights.first(remaining.values.size()));
  if (top_p < 1.0) {
    const auto of_values = weights.first(remaining.values.size());
    remaining = keep_up_to(remaining, place_of_share(remaining.values, of_values, buckets, top_p));
  }
  if (params.min_p > 0.0) {
    remaining = keep_if(remaining, [&](std::size_t i) { return double{weights[i]} >= params.min_p; });
  }
  return {.ids = remaining.ids, .weights = weights.first(remaining.values.size())};
}

Sampler::Place Sampler::place_of_rank(std::span<const float> values, const Buckets& buckets,
                                      std::int64_t rank) {
  std::ranges::fill(bucket_counts_, 0);
  for (const float value : values) ++bucket_counts_[buckets.of(value)];
  std::size_t bucket = 0;
  while (bucket_counts_[bucket] < rank) rank -= bucket_counts_[bucket++];
  collect_bucket(values, buckets, bucket);
  const auto place = bucket_.begin() + (rank - 1);
  std::ranges::nth_element(bucket_, place, [](const Place& a, const Place& b) { return a.is_before(b); });
  return *place;
}

Sampler::Place Sampler::place_of_share(std::span<const float> values, std::span<const float> weights,
                                       const Buckets& buckets, double share) {
  std::ranges::fill(bucket_weights_, 0.0);
  for (std::size_t i = 0; i < values.size(); ++i) bucket_weights_[buckets.of(values[i])] += weights[i];
  double total = 0.0;
  for (const double weight : bucket_weights_) total += weight;
  const double target = share * total;
  double above = 0.0;
  std::size_t bucket = 0;
  while (above + bucket_weights_[bucket] < target && bucket + 1 < kNumBuckets)
    above += bucket_weights_[bucket++];
  collect_bucket(values, buckets, bucket);
  std::ranges::sort(bucket_, [](const Place& a, const Place& b) { return a.is_before(b); });
  for (const Place& place : bucket_) {
    above += weights[place.index];
    if (above >= target) return place;
  }
  return bucket_.back();
}

void Sampler::collect_bucket(std::span<const float> values, const Buckets& buckets, std::size_t bucket) {
  bucket_.clear();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (buckets.of(values[i]) == bucket) bucket_.push_back({values[i], static_cast<std::int64_t>(i)});
  }
}

}  // namespace adaptrt
