#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// TensorRT-LLM's SamplingConfig. Sampling is greedy without top_k, top_p and min_p, and also with top_k = 1
/// or temperature = 0. A beam_width above 1 selects beam search, which draws nothing.
struct SamplingConfig {
  std::int32_t beam_width = 1;                                      // >= 1; 1: no search
  std::optional<std::int32_t> top_k = std::nullopt;                 // >= 0; 0: no limit
  std::optional<double> top_p = std::nullopt;                       // (0, 1]
  std::optional<double> top_p_min = std::nullopt;                   // (0, 1]; nullopt: 1e-6
  std::optional<std::int32_t> top_p_reset_ids = std::nullopt;       // >= -1; nullopt and -1: none
  std::optional<double> top_p_decay = std::nullopt;                 // (0, 1]; nullopt: 1
  std::optional<std::uint64_t> seed = std::nullopt;                 // nullopt: 0, as in TensorRT-LLM
  std::optional<double> temperature = std::nullopt;                 // >= 0; nullopt: 1
  std::optional<std::int32_t> min_tokens = std::nullopt;            // >= 0; no end before
  std::optional<double> beam_search_diversity_rate = std::nullopt;  // >= 0; nullopt: 0; beam search only
  std::optional<double> repetition_penalty = std::nullopt;          // > 0; nullopt: 1
  std::optional<double> presence_penalty = std::nullopt;            // nullopt: 0
  std::optional<double> frequency_penalty = std::nullopt;           // nullopt: 0
  std::optional<double> length_penalty = std::nullopt;              // nullopt: 0; beam search only
  std::optional<std::int32_t> early_stopping = std::nullopt;        // EarlyStopping; nullopt: 1; beam search
                                                                    // only
  std::optional<std::int32_t> no_repeat_ngram_size = std::nullopt;  // >= 0; nullopt and 0: no limit
  std::optional<std::int32_t> num_return_sequences = std::nullopt;  // >= 1; nullopt: the request's
  std::optional<double> min_p = std::nullopt;                       // [0, 1]
  std::optional<std::vector<std::int32_t>> beam_width_array = std::nullopt;  // refused when set

  [[nodiscard]] Problems validate() const;
  bool operator==(const SamplingConfig&) const = default;
};

/// A valid SamplingConfig with its defaults filled in.
struct SamplingParams {
  bool greedy = true;
  std::int32_t top_k = 0;  ///< 0 for all
  double top_p = 1.0;
  /// After each generated token: top_p again if the token is top_p_reset_id, otherwise max(current top_p *
  /// top_p_decay, top_p_min).
  double top_p_decay = 1.0;
  double top_p_min = 1e-6;
  std::int32_t top_p_reset_id = -1;  ///< -1 for none
  double min_p = 0.0;
  double temperature = 1.0;
  std::uint64_t seed = 0;
  std::int32_t min_tokens = 0;
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::int32_t no_repeat_ngram_size = 0;  ///< 0 for no limit
};

/// Fills in the defaults. Throws ConfigError with all of config.validate()'s problems.
[[nodiscard]] SamplingParams resolve(const SamplingConfig& config);

/// When a search ends after beam_width beams have ended. The values correspond to True, False and "never" in
/// transformers, and to 1, 0 and any other number in TensorRT-LLM.
enum class EarlyStopping : std::uint8_t {
  kWhenEnoughHaveEnded,
  /// When the best active beam, ended now, would not be among them.
  kByEstimate,
  /// When no active beam can still be among them. With a length_penalty above 0, the best one is assumed to
  /// reach max_tokens.
  kNever,
};

/// Beam search parameters of a SamplingConfig with a beam_width above 1, with TensorRT-LLM's defaults filled
/// in.
struct BeamSearchParams {
  std::int32_t beam_width = 1;
  double length_penalty = 0.0;
  EarlyStopping early_stopping = EarlyStopping::kWhenEnoughHaveEnded;
  double diversity_rate = 0.0;
};

/// Returns the beam search parameters of a valid configuration.
[[nodiscard]] BeamSearchParams resolve_beams(const SamplingConfig& config);

}  // namespace adaptrt
