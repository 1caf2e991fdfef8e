#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/sampling_config.h"

namespace adaptrt {

struct LogitRange;
struct ScoredToken;

/// Tokens that a request forbids or favours, in addition to its SamplingConfig.
struct TokenConstraints {
  /// Forbidden before SamplingParams::min_tokens tokens were generated.
  std::optional<std::int32_t> end_id = std::nullopt;
  /// Other tokens that are forbidden in the same way: stop words of one token.
  std::vector<std::int32_t> stop_ids = {};
  /// Token sequences that never appear whole; their beginning may be in the prompt.
  std::vector<std::vector<std::int32_t>> bad_words = {};
  /// Bias [row length] that is added to the logits first; nullptr: none. -infinity forbids a token.
  std::shared_ptr<const std::vector<float>> embedding_bias = nullptr;

  /// Empty words, tokens outside the vocabulary, a bias of another size or with NaN or +infinity.
  /// `vocab_size`: of the request.
  [[nodiscard]] Problems validate(std::int64_t vocab_size) const;
};

/// One request's sampling, from its first token to its last.
class SamplerState {
 public:
  /// `max_length`: prompt and generated tokens together, at most. Room for them is made here, not while
  /// sampling.
  /// `vocabulary_change`: tokens that the request has beyond the vocabulary; below 0: last ones of it
  /// that it does not have.
  SamplerState(const SamplingParams& params, TokenConstraints constraints, std::int32_t prompt_length,
               std::int32_t max_length, std::int32_t vocabulary_change = 0);

  [[nodiscard]] const SamplingParams& params() const { return params_; }
  [[nodiscard]] const TokenConstraints& constraints() const { return constraints_; }

  /// Goes on as `other` does, of a request that differs in nothing but its tokens. Allocates nothing.
  void follow(const SamplerState& other);

 private:
  friend class Sampler;
  /// A token that occurred, and how often it was generated.
  struct Occurrence {
    std::int32_t token = 0;
    std::int32_t times_generated = 0;
  };
  void count_new_tokens(std::span<const std::int32_t> tokens);
  /// SamplingParams::top_p after the tokens so far.
  [[nodiscard]] double current_top_p(std::span<const std::int32_t> tokens);
  [[nodiscard]] bool has_penalties() const;

  SamplingParams params_;
  TokenConstraints constraints_;
  std::int32_t prompt_length_;
  std::int32_t vocabulary_change_;
  std::int32_t num_counted_ = 0;
  double top_p_;
  std::size_t num_decayed_;  // tokens, those of the prompt included, that top_p_ is the value after
  std::vector<Occurrence> occurrences_;  // ascending tokens
};

struct SampledToken {
  std::int32_t token = 0;
  /// Log probability from LogSoftmax; 0 unless it was requested.
  float log_prob = 0.0F;
};

struct TokenProbability {
  std::int32_t token = 0;
  double probability = 0.0;
};

/// Changes to a row from outside the request's own configuration.
struct RowChanges {
  /// Unless it is empty, a bit for each token of the vocabulary: bit i % 32 of word i / 32 is not set where
  /// token i is forbidden. Tokens beyond it are.
  std::span<const std::uint32_t> allowed = {};
  /// Logits [row length] that replace the engine's; nullptr: none. Log probs are still those of the engine's
  /// logits.
  const float* logits = nullptr;
};

/// Turns rows of logits into tokens. Holds scratch memory for one thread; any number of requests can share
/// it.
///
/// In this order: embedding_bias; repetition penalty p over the tokens of prompt and generation (logit / p if
/// positive, logit * p if not, as in transformers); presence and frequency penalty over the generated tokens
/// only (logit - presence - frequency * times, as in OpenAI's API and vLLM; TensorRT-LLM counts the prompt's
/// too and subtracts after the temperature); bad words, repeated n-grams, min_tokens and a mask forbid
/// tokens; then the most probable token, or: temperature, top_k, top_p (the fewest most probable tokens of
/// what top_k left whose share reaches top_p, which may decay from token to token), min_p (probability at
/// least min_p times the highest), and one draw.
///
/// Rows have as many logits as the request's vocabulary: the engine's, with or without some tokens.
///
/// If logits are equal, the lower token id counts as the higher logit. The draw is a function of (seed,
/// number of tokens generated so far) and the row alone, so neither the rest of a batch nor a pause changes
/// it.
class Sampler {
 public:
  /// `max_new_tokens`: the most that a request has beyond the vocabulary.
  explicit Sampler(std::int64_t vocab_size, std::int64_t max_new_tokens = 0);

  /// Samples the token after `tokens` (the request's prompt and what it generated) from a row of logits, and
  /// fills `most_likely` as LogSoftmax does. Throws StepError when a logit is NaN or +infinity, or when
  /// every token is forbidden; the state still serves.
  [[nodiscard]] SampledToken sample(SamplerState& state, const float* logits,
                                    std::span<const std::int32_t> tokens, bool want_log_prob,
                                    std::span<TokenLogProb> most_likely = {}, const RowChanges& changes = {});

  /// For a search with beams: fills `best` with the tokens that add most to a beam's score after `tokens`,
  /// best first, of equal ones the lowest id first; returns how many there are, which is less than there is
  /// room for when the others are forbidden. As in transformers' beam search, the score is the log prob after
  /// what sample() does to logits before it chooses (embedding_bias to min_tokens); the log prob is that of
  /// the row divided by the temperature. Fills `most_likely` as sample() does. Throws StepError when a logit
  /// is NaN or +infinity, or becomes so.
  [[nodiscard]] std::size_t score_tokens(SamplerState& state, const float* logits,
                                         std::span<const std::int32_t> tokens, std::span<ScoredToken> best,
                                         std::span<TokenLogProb> most_likely = {});

  /// The tokens that sample() would draw from, in ascending order, with their probabilities. For looking into
  /// a configuration; throws as sample() does.
  [[nodiscard]] std::vector<TokenProbability> distribution(SamplerState& state, const float* logits,
                                                           std::span<const std::int32_t> tokens);

 private:
  /// A place in the order of values: highest first, of equals the one that stands first.
  struct Place {
    float value = 0.0F;
    std::int64_t index = 0;
    [[nodiscard]] bool is_before(const Place& other) const {
      return value > other.value || (value == other.value && index < other.index);
    }
  };
  /// Divides the interval of finite values into equal buckets, the highest values in the first.
  struct Buckets {
    float max = 0.0F;
    float scale = 0.0F;
    Buckets(float highest, float lowest);
    [[nodiscard]] std::size_t of(float value) const;
  };

  /// A row after the constraints, and what is known of it.
  struct ProcessedRow {
    std::span<const float> logits;
    float max = 0.0F;
    float min = 0.0F;  // of the finite ones
  };
  /// Tokens that the filters leave, as views of the scratch memory; all tokens if `ids` is empty.
  struct Candidates {
    std::span<const std::int32_t> ids;
    std::span<const float> weights;
    [[nodiscard]] std::int32_t token(std::size_t index) const {
      return ids.empty() ? static_cast<std::int32_t>(index) : ids[index];
    }
  };

  [[nodiscard]] ProcessedRow process(SamplerState& state, const LogitRange& range, const float* logits,
                                     std::span<const std::int32_t> tokens,
                                     std::span<const std::uint32_t> allowed);
  [[nodiscard]] const float* apply_constraints(SamplerState& state, const float* logits,
                                               std::span<const std::int32_t> tokens,
                                               std::span<const std::uint32_t> allowed);
  void apply_penalties(const SamplerState& state);
  void forbid_bad_words(const TokenConstraints& constraints, std::span<const std::int32_t> tokens);
  void forbid_repeated_ngrams(std::int32_t size, std::span<const std::int32_t> tokens, std::span<float> row);
  /// Forbids all tokens but `allowed` in a row of processed_.
  void forbid_all_but(std::span<const std::uint32_t> allowed, std::span<float> row);
  [[nodiscard]] Candidates filter(const SamplingParams& params, double top_p, const ProcessedRow& row);
  [[nodiscard]] Place place_of_rank(std::span<const float> values, const Buckets& buckets, std::int64_t rank);
  [[nodiscard]] Place place_of_share(std::span<const float> values, std::span<const float> weights,
                                     const Buckets& buckets, double share);
  void collect_bucket(std::span<const float> values, const Buckets& buckets, std::size_t bucket);
  [[nodiscard]] std::size_t row_size(const SamplerState& state) const {
    return static_cast<std::size_t>(vocab_size_ + state.vocabulary_change_);
  }

  std::int64_t vocab_size_;
  std::vector<TokenLogProb> highest_;  // of score_tokens()
  // Scratch, as large as the largest row.
  std::vector<float> processed_;  // logits after the constraints
  std::vector<float> values_;     // logits of the tokens that are left, in the order of their ids
  std::vector<float> weights_;    // their unnormalised probabilities
  std::vector<std::int32_t> ids_;
  std::vector<Place> bucket_;  // the values of one bucket
  std::vector<std::int64_t> bucket_counts_;
  std::vector<double> bucket_weights_;
};

}  // namespace adaptrt
