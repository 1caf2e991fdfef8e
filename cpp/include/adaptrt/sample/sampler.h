#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/highest_logits.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/sampling_config.h"

namespace adaptrt {

struct LogitRange;
struct ScoredToken;

/// Messages of StepErrors about rows from the engine.
inline constexpr const char* kUnusableLogitsError = "the engine's logits have NaN or infinity";
inline constexpr const char* kEveryTokenForbiddenError = "every token is forbidden";

/// Tokens that a request forbids or favours, in addition to its SamplingConfig.
struct TokenConstraints {
  /// Forbidden until SamplingParams::min_tokens tokens are generated.
  std::optional<std::int32_t> end_id = std::nullopt;
  /// Other tokens that are forbidden in the same way: stop words of one token.
  std::vector<std::int32_t> stop_ids = {};
  /// Token sequences that must not appear; their beginning may be in the prompt.
  std::vector<std::vector<std::int32_t>> bad_words = {};
  /// Bias [row length] that is added to the logits first; nullptr: none. -infinity forbids a token.
  std::shared_ptr<const std::vector<float>> embedding_bias = nullptr;

  /// Lists empty words, tokens outside the request's vocabulary of `vocab_size` tokens, and a bias with a
  /// wrong size, NaN or +infinity.
  [[nodiscard]] Problems validate(std::int64_t vocab_size) const;
};

/// Sampling state of one request, from its first token to its last.
class SamplerState {
 public:
  /// `max_length`: maximum number of prompt and generated tokens together. Memory for them is allocated here,
  /// not during sampling. `vocabulary_change`: number of tokens that the request has beyond the vocabulary;
  /// if negative, number of tokens missing at its end.
  SamplerState(const SamplingParams& params, TokenConstraints constraints, std::int32_t prompt_length,
               std::int32_t max_length, std::int32_t vocabulary_change = 0);

  [[nodiscard]] const SamplingParams& params() const { return params_; }
  [[nodiscard]] const TokenConstraints& constraints() const { return constraints_; }

  /// Returns how many of the highest logits of the engine's row Sampler::sample() without RowChanges needs
  /// after `num_tokens` prompt and generated tokens; nullopt if it needs the whole row. If it needs one, the
  /// token is that logit's, and no state changes. Later tokens need at most as many.
  [[nodiscard]] std::optional<std::int32_t> num_highest_needed(std::size_t num_tokens) const;

  /// Copies the state of `other`, a sampler of the same request with different tokens. Allocates nothing.
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
  /// True if the end tokens are forbidden because fewer than min_tokens tokens are generated.
  [[nodiscard]] bool forbids_end(std::size_t num_tokens) const;
  /// True if the configuration changes logits before the next token is chosen.
  [[nodiscard]] bool changes_logits(std::size_t num_tokens) const;

  SamplingParams params_;
  TokenConstraints constraints_;
  std::int32_t prompt_length_;
  std::int32_t vocabulary_change_;
  std::int32_t num_counted_ = 0;
  double top_p_;
  std::size_t num_decayed_;              // number of tokens, including the prompt, that top_p_ accounts for
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

/// Changes to a row that are not part of the request's configuration.
struct RowChanges {
  /// Mask of allowed tokens; empty: no mask. Token i is forbidden if bit i % 32 of word i / 32 is clear, or
  /// if it is beyond the mask.
  std::span<const std::uint32_t> allowed = {};
  /// Logits [row length] that replace the engine's; nullptr for none. Log probs still use the engine's
  /// logits.
  const float* logits = nullptr;
};

/// Turns rows of logits into tokens. Has scratch memory for one thread; any number of requests can share it.
///
/// Order of operations:
/// 1. Add embedding_bias.
/// 2. Repetition penalty p over prompt and generated tokens (logit / p if positive, otherwise logit * p, as
/// in transformers).
/// 3. Presence and frequency penalty over generated tokens only (logit - presence - frequency * count, as in
/// OpenAI's API and vLLM; TensorRT-LLM also counts the prompt, and subtracts after the temperature).
/// 4. Forbid tokens: bad words, repeated n-grams, min_tokens, a mask.
/// 5. Greedy: take the most probable token. Otherwise: temperature, top_k, top_p (the fewest most probable of
/// the remaining tokens whose share reaches top_p, which may decay from token to token), min_p (probability
/// at least min_p times the highest), and one draw.
///
/// Rows have the size of the request's vocabulary: the engine's, with or without some tokens.
///
/// Among equal logits, the lower token id counts as the higher logit. The draw depends only on the seed, the
/// number of generated tokens and the row, so neither the rest of the batch nor preemption changes it.
class Sampler {
 public:
  /// `max_new_tokens`: maximum number of tokens that a request has beyond the vocabulary.
  explicit Sampler(std::int64_t vocab_size, std::int64_t max_new_tokens = 0);

  /// Samples the token after `tokens` (prompt and generated tokens) from a row of logits, and fills
  /// `most_likely` like LogSoftmax. Throws StepError if a logit is NaN or +infinity, or if every token is
  /// forbidden; the state stays usable.
  [[nodiscard]] SampledToken sample(SamplerState& state, const float* logits,
                                    std::span<const std::int32_t> tokens, bool want_log_prob,
                                    std::span<TokenLogProb> most_likely = {}, const RowChanges& changes = {});

  /// The same without RowChanges, from the highest logits of the row. It has at least
  /// num_highest_needed() of them or all, and at least as many as `most_likely`.
  [[nodiscard]] SampledToken sample(SamplerState& state, const HighestLogits& row,
                                    std::span<const std::int32_t> tokens, bool want_log_prob,
                                    std::span<TokenLogProb> most_likely = {});

  /// For beam search: fills `best` with the tokens of the highest scores after `tokens`, best first, equal
  /// scores ordered by id. Returns their number, which is smaller than `best` if the other tokens are
  /// forbidden. As in transformers' beam search, the score is the log prob after sample()'s processing of
  /// logits (embedding_bias to min_tokens); the log prob is that of the row divided by the temperature. Fills
  /// `most_likely` like sample(). Throws StepError if a logit is NaN or +infinity, or becomes so.
  [[nodiscard]] std::size_t score_tokens(SamplerState& state, const float* logits,
                                         std::span<const std::int32_t> tokens, std::span<ScoredToken> best,
                                         std::span<TokenLogProb> most_likely = {});

  /// Returns the tokens that sample() could draw, in ascending order, with their probabilities. For
  /// inspecting a configuration; throws the errors of sample().
  [[nodiscard]] std::vector<TokenProbability> distribution(SamplerState& state, const float* logits,
                                                           std::span<const std::int32_t> tokens);

 private:
  /// Position in the order of values: highest first; equal values by index.
  struct Place {
    float value = 0.0F;
    std::int64_t index = 0;
    [[nodiscard]] bool is_before(const Place& other) const {
      return value > other.value || (value == other.value && index < other.index);
    }
  };
  /// Splits the range of finite values into buckets of equal width, the highest values in the first.
  struct Buckets {
    float max = 0.0F;
    float scale = 0.0F;
    Buckets(float highest, float lowest);
    [[nodiscard]] std::size_t of(float value) const;
  };

  /// A row after the constraints, with its range.
  struct ProcessedRow {
    std::span<const float> logits;
    float max = 0.0F;
    float min = 0.0F;  // minimum of the finite logits
  };
  /// Logits of the tokens that have passed the filters so far, ordered by id; of all tokens if `ids` is
  /// empty.
  struct Remaining {
    std::span<const float> values;
    std::span<const std::int32_t> ids = {};
  };
  /// Tokens that pass the filters, as views of the scratch memory; all tokens if `ids` is empty.
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
  /// Forbids all tokens except `allowed` in a row of processed_.
  void forbid_all_but(std::span<const std::uint32_t> allowed, std::span<float> row);
  [[nodiscard]] Candidates filter(const SamplingParams& params, double top_p, const ProcessedRow& row);
  /// The filters after top_k.
  [[nodiscard]] Candidates filter_by_probability(const SamplingParams& params, double top_p,
                                                 const Buckets& buckets, Remaining remaining);
  /// Keeps those of `remaining` for which keep(i) is true, and their weights. The result is in scratch
  /// memory, where `remaining` may be, too. It keeps the order of ids, so that equal values are still ordered
  /// by id.
  template <typename Keep>
  [[nodiscard]] Remaining keep_if(const Remaining& remaining, const Keep& keep);
  [[nodiscard]] Remaining keep_up_to(const Remaining& remaining, const Place& last);
  [[nodiscard]] static std::int32_t draw(const SamplerState& state, const Candidates& candidates,
                                         std::size_t num_tokens);
  [[nodiscard]] Place place_of_rank(std::span<const float> values, const Buckets& buckets, std::int64_t rank);
  [[nodiscard]] Place place_of_share(std::span<const float> values, std::span<const float> weights,
                                     const Buckets& buckets, double share);
  void collect_bucket(std::span<const float> values, const Buckets& buckets, std::size_t bucket);
  [[nodiscard]] std::size_t row_size(const SamplerState& state) const {
    return static_cast<std::size_t>(vocab_size_ + state.vocabulary_change_);
  }

  std::int64_t vocab_size_;
  std::vector<TokenLogProb> highest_;  // scratch of score_tokens()
  std::vector<TokenLogit> by_token_;   // highest logits, ordered by token
  // Scratch memory, with the size of the largest row:
  std::vector<float> processed_;  // logits after the constraints
  std::vector<float> values_;     // logits of the remaining tokens, ordered by id
  std::vector<float> weights_;    // their unnormalised probabilities
  std::vector<std::int32_t> ids_;
  std::vector<Place> bucket_;  // values of one bucket
  std::vector<std::int64_t> bucket_counts_;
  std::vector<double> bucket_weights_;
};

}  // namespace adaptrt
