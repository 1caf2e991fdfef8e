#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/draft/lookahead_config.h"
#include "adaptrt/exec/unsupported.h"

namespace adaptrt {

/// TensorRT-LLM's DecodingConfig.
struct DecodingConfig {
  /// The name of DecodingMode's function ("Lookahead"); nullopt: what the other fields say.
  std::optional<std::string> decoding_mode;
  /// Of all requests that have none of their own.
  std::optional<LookaheadDecodingConfig> lookahead_decoding_config;
  Unsupported medusa_choices;
  Unsupported eagle_config;

  [[nodiscard]] Problems validate() const;
  bool operator==(const DecodingConfig&) const = default;
};

/// TensorRT-LLM's ExternalDraftTokensConfig: what a caller expects right after the prompt.
struct ExternalDraftTokensConfig {
  std::vector<std::int32_t> tokens;
  Unsupported logits;
  std::optional<double> acceptance_threshold;
  std::optional<bool> fast_logits;

  /// Also names the tokens outside the vocabulary.
  [[nodiscard]] Problems validate(std::int64_t vocab_size) const;
  bool operator==(const ExternalDraftTokensConfig&) const = default;
};

}  // namespace adaptrt
