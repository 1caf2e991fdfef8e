#include "adaptrt/exec/decoding_config.h"

#include <algorithm>

namespace adaptrt {
namespace {

/// With the token before them, this is the maximum number of logit rows of a step with drafts.
constexpr std::int32_t kMostDrafts = 31;

}  // namespace

Problems DecodingConfig::validate() const {
  Problems problems;
  const bool is_lookahead = decoding_mode == "Lookahead";
  if (decoding_mode && *decoding_mode != "Auto" && !is_lookahead) {
    problems.add("decoding_mode is " + *decoding_mode +
                 "; accepted: None, Auto or Lookahead, because each request's sampling_config says how its "
                 "tokens are chosen");
  }
  if (is_lookahead && !lookahead_decoding_config) {
    problems.add(
        "decoding_mode is Lookahead and lookahead_decoding_config None; accepted: a LookaheadDecodingConfig");
  }
  if (lookahead_decoding_config) {
    if (decoding_mode == "Auto") {
      problems.add("decoding_mode is Auto and lookahead_decoding_config is given; accepted: Lookahead");
    }
    problems.add_all("lookahead_decoding_config.", lookahead_decoding_config->validate());
  }
  if (medusa_choices.is_set())
    problems.add("medusa_choices is given; accepted: None, because engines have no such heads");
  if (eagle_config.is_set())
    problems.add("eagle_config is given; accepted: None, because engines have no such heads");
  return problems;
}

Problems DraftTargetDecodingConfig::validate() const {
  Problems problems;
  if (max_draft_len < 1 || max_draft_len > kMostDrafts) {
    problems.add("max_draft_len is " + std::to_string(max_draft_len) + "; accepted: 1 to " +
                 std::to_string(kMostDrafts));
  }
  if (kv_cache_size && *kv_cache_size == 0) problems.add("kv_cache_size is 0; accepted: None, 1 or more");
  problems.add_all("peft_cache_config.", peft_cache_config.validate());
  if (peft_cache_config.lora_prefetch_dir) {
    problems.add("peft_cache_config.lora_prefetch_dir is '" + *peft_cache_config.lora_prefetch_dir +
                 "'; accepted: None, requests bring the draft engine's adapters along");
  }
  return problems;
}

Problems DraftTargetDecodingConfig::validate(const EngineInfo& target, const EngineInfo& draft) const {
  Problems problems = validate();
  if (draft.vocab_size != target.vocab_size) {
    problems.add("the draft engine's vocab_size is " + std::to_string(draft.vocab_size) +
                 "; accepted: the engine's, " + std::to_string(target.vocab_size));
  }
  if (!draft.has_logits || !draft.has_kv_cache) {
    problems.add("the draft engine's model has no lm_head or no KV cache, and guesses nothing");
    return problems;
  }
  if (draft.has_states()) {
    problems.add("the draft engine keeps states, which cannot take wrong drafts back");
    return problems;
  }
  if (kv_cache_size && *kv_cache_size < draft.kv_block_bytes) {
    problems.add("kv_cache_size is " + std::to_string(*kv_cache_size) +
                 ", less than one KV block of the draft engine, which takes " +
                 std::to_string(draft.kv_block_bytes));
  }
  return problems;
}

Problems ExternalDraftTokensConfig::validate(std::int64_t vocab_size) const {
  Problems problems;
  if (tokens.empty()) problems.add("tokens is empty; accepted: one token or more");
  const auto outside =
      std::ranges::find_if(tokens, [&](std::int32_t token) { return token < 0 || token >= vocab_size; });
  if (outside != tokens.end()) {
    problems.add("tokens[" + std::to_string(outside - tokens.begin()) + "] is " + std::to_string(*outside) +
                 "; the vocabulary is 0 to " + std::to_string(vocab_size - 1));
  }
  const auto require_none = [&](const char* name, bool is_set) {
    if (!is_set) return;
    problems.add(
        std::string(name) +
        " is given; accepted: None, because a draft counts when it is the token that would have been "
        "chosen without it");
  };
  require_none("logits", logits.is_set());
  require_none("acceptance_threshold", acceptance_threshold.has_value());
  if (fast_logits.value_or(false))
    problems.add("fast_logits is True; accepted: None or False, because logits of drafts are not used");
  return problems;
}

}  // namespace adaptrt
