#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
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
  /// Name of DecodingMode's function ("Lookahead"); nullopt: the other fields decide.
  std::optional<std::string> decoding_mode;
  /// Default for requests that have no lookahead configuration.
  std::optional<LookaheadDecodingConfig> lookahead_decoding_config;
  Unsupported medusa_choices;
  Unsupported eagle_config;

  [[nodiscard]] Problems validate() const;
  bool operator==(const DecodingConfig&) const = default;
};

/// TensorRT-LLM's DraftTargetDecodingConfig, with cache sizes: a second, small engine drafts tokens.
struct DraftTargetDecodingConfig {
  std::int32_t max_draft_len = 4;
  std::string speculative_model_dir;
  std::optional<std::size_t> kv_cache_size;
  PeftCacheConfig peft_cache_config;

  [[nodiscard]] Problems validate() const;
  /// Lists the reasons why `draft` cannot draft for `target`.
  [[nodiscard]] Problems validate(const EngineInfo& target, const EngineInfo& draft) const;
  bool operator==(const DraftTargetDecodingConfig&) const = default;
};

constexpr auto fields_of(const DraftTargetDecodingConfig* /*type*/) {
  using C = DraftTargetDecodingConfig;
  return FieldList{
      Field{"max_draft_len", &C::max_draft_len, "Maximum number of drafts of one step, 1 to 31."},
      Field{"speculative_model_dir", &C::speculative_model_dir,
            "Directory of the draft engine, which must have the same vocabulary."},
      Field{
          "kv_cache_size", &C::kv_cache_size,
          "Bytes of its KV cache; None: for max_batch_size sequences of its max_seq_len, or an eighth of the "
          "free memory where that is less."},
      Field{"peft_cache_config", &C::peft_cache_config,
            "Sizes of its LoRA cache, for adapters of its own (Request.draft_lora_config)."}};
}

/// TensorRT-LLM's ExternalDraftTokensConfig: draft tokens from the caller for the position right after the
/// prompt.
struct ExternalDraftTokensConfig {
  std::vector<std::int32_t> tokens;
  Unsupported logits;
  std::optional<double> acceptance_threshold;
  std::optional<bool> fast_logits;

  /// Lists all problems, including tokens outside the vocabulary.
  [[nodiscard]] Problems validate(std::int64_t vocab_size) const;
  bool operator==(const ExternalDraftTokensConfig&) const = default;
};

}  // namespace adaptrt
