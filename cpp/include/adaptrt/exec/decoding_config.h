#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"
#include "adaptrt/draft/lookahead_config.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/unsupported.h"
#include "adaptrt/lora/peft_cache_config.h"

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

/// TensorRT-LLM's DraftTargetDecodingConfig, sizes, and what adapters of the draft engine need: a second,
/// small engine that guesses what comes next.
struct DraftTargetDecodingConfig {
  std::int32_t max_draft_len = 4;
  std::string speculative_model_dir;
  std::optional<std::size_t> kv_cache_size;
  PeftCacheConfig peft_cache_config;

  [[nodiscard]] Problems validate() const;
  /// What keeps `draft` from guessing for `target`.
  [[nodiscard]] Problems validate(const EngineInfo& target, const EngineInfo& draft) const;
  bool operator==(const DraftTargetDecodingConfig&) const = default;
};

constexpr auto fields_of(const DraftTargetDecodingConfig* /*type*/) {
  using C = DraftTargetDecodingConfig;
  return std::tuple{
      Field{"max_draft_len", &C::max_draft_len, "Drafts of one step at most, 1 to 31."},
      Field{"speculative_model_dir", &C::speculative_model_dir,
            "Directory of the draft engine, whose tokens are the engine's."},
      Field{
          "kv_cache_size", &C::kv_cache_size,
          "Bytes of its KV cache; None: for max_batch_size sequences of its max_seq_len, or an eighth of the "
          "free memory where that is less."},
      Field{"peft_cache_config", &C::peft_cache_config,
            "Sizes of its LoRA cache, for adapters of its own (Request.draft_lora_config)."}};
}

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
