#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/decoding_config.h"
#include "adaptrt/exec/float_tensor.h"
#include "adaptrt/exec/logits_post_processor.h"
#include "adaptrt/exec/pooling_params.h"
#include "adaptrt/exec/prompt_tuning.h"
#include "adaptrt/exec/unsupported.h"
#include "adaptrt/guide/guided_decoding.h"
#include "adaptrt/kv/retention.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/sample/sampling_config.h"

namespace adaptrt {

using TokenId = std::int32_t;
/// Id of a request within its executor; the first is 1.
using RequestId = std::uint64_t;

/// Maximum of OutputConfig::top_log_probs.
inline constexpr std::int32_t kMaxTopLogProbs = 20;

/// TensorRT-LLM's OutputConfig with two more fields, top_log_probs and return_prompt_log_probs: optional
/// contents of a Result.
struct OutputConfig {
  bool return_log_probs = false;
  bool return_context_logits = false;
  bool return_generation_logits = false;
  bool exclude_input_from_output = false;
  bool return_encoder_output = false;
  bool return_perf_metrics = false;
  Unsupported additional_model_outputs;
  std::int32_t top_log_probs = 0;
  bool return_prompt_log_probs = false;

  bool operator==(const OutputConfig&) const = default;
};

constexpr auto fields_of(const OutputConfig* /*type*/) {
  using C = OutputConfig;
  return std::tuple{
      Field{"return_log_probs", &C::return_log_probs, "Result.log_probs and cum_log_probs."},
      Field{"return_context_logits", &C::return_context_logits,
            "Result.context_logits. The whole prompt is computed then, whatever the KV cache holds."},
      Field{"return_generation_logits", &C::return_generation_logits, "Result.generation_logits."},
      Field{"exclude_input_from_output", &C::exclude_input_from_output,
            "Leave the prompt out of Result.output_token_ids. Streamed responses never have it."},
      Field{"return_encoder_output", &C::return_encoder_output,
            "Result.encoder_output. Refused when True where the engine has no encoder. Of an engine that is "
            "an encoder alone, what a request ends in that has no pooling_params."},
      Field{"return_perf_metrics", &C::return_perf_metrics, "Refused when True."},
      Field{"additional_model_outputs", &C::additional_model_outputs, "Refused unless None."},
      Field{"top_log_probs", &C::top_log_probs,
            "Result.top_log_probs of so many of the most likely tokens, 0 to 20; 0: none. With "
            "return_prompt_log_probs also Result.prompt_top_log_probs. Not in TensorRT-LLM."},
      Field{"return_prompt_log_probs", &C::return_prompt_log_probs,
            "Result.prompt_log_probs. The whole prompt is computed then, whatever the KV cache holds; its "
            "logits are not kept. NaN for virtual tokens. Not in TensorRT-LLM."}};
}

/// TensorRT-LLM's RequestType. Only kContextAndGeneration is accepted.
enum class RequestType : std::uint8_t { kContextAndGeneration, kContextOnly, kGenerationOnly };

/// TensorRT-LLM's Request.
struct Request {
  std::vector<TokenId> input_token_ids;
  std::int32_t max_tokens = 0;
  bool streaming = false;
  SamplingConfig sampling_config;
  OutputConfig output_config;
  std::optional<TokenId> end_id;
  std::optional<TokenId> pad_id;
  std::optional<std::vector<std::int32_t>> position_ids;
  std::optional<std::vector<std::vector<TokenId>>> bad_words;
  std::optional<std::vector<std::vector<TokenId>>> stop_words;
  std::optional<FloatTensor> embedding_bias;
  std::optional<ExternalDraftTokensConfig> external_draft_tokens_config;
  std::optional<PromptTuningConfig> prompt_tuning_config;
  std::optional<LoraConfig> lora_config;
  std::optional<LookaheadDecodingConfig> lookahead_config;
  std::optional<KvCacheRetentionConfig> kv_cache_retention_config;
  std::optional<std::string> logits_post_processor_name;
  std::optional<PostProcessorFunction> logits_post_processor;
  std::optional<std::vector<TokenId>> encoder_input_token_ids;
  std::optional<std::uint64_t> client_id;
  bool return_all_generated_tokens = false;
  float priority = 0.5F;
  std::int32_t num_return_sequences = 1;
  Unsupported eagle_config;
  std::optional<GuidedDecodingParams> guided_decoding_params;
  std::optional<std::chrono::milliseconds> allotted_time_ms;
  std::optional<std::uint64_t> cache_salt_id;
  std::optional<LoraConfig> draft_lora_config;
  std::optional<PoolingParams> pooling_params;
  std::optional<std::vector<std::int32_t>> token_type_ids;
  RequestType request_type = RequestType::kContextAndGeneration;
  Unsupported multimodal_embedding;
  Unsupported multimodal_input;
  Unsupported mrope_config;
  Unsupported context_phase_params;

  /// Number of tokens that the scheduler makes room for. It is 1 for requests that return rows instead of
  /// tokens: they end with their prompt, like a request for one token.
  [[nodiscard]] std::int32_t max_scheduled_tokens() const {
    return pooling_params ? 1 : std::max(1, max_tokens);
  }
  /// True if beam search is used.
  [[nodiscard]] bool has_beams() const { return sampling_config.beam_width > 1; }
  /// Number of generated sequences: the beam width with beams, otherwise sampling_config's number if it is
  /// set, otherwise this request's.
  [[nodiscard]] std::int32_t num_sequences() const {
    return has_beams() ? sampling_config.beam_width
                       : sampling_config.num_return_sequences.value_or(num_return_sequences);
  }
  [[nodiscard]] std::int64_t encoder_length() const {
    return encoder_input_token_ids ? static_cast<std::int64_t>(encoder_input_token_ids->size()) : 0;
  }
  /// Maximum number of returned beams: sampling_config's number if it is set, otherwise this request's unless
  /// that is 1, otherwise all.
  [[nodiscard]] std::int32_t num_returned_beams() const {
    return sampling_config.num_return_sequences.value_or(
        num_return_sequences == 1 ? sampling_config.beam_width : num_return_sequences);
  }
  /// Lists all reasons why the request cannot run on an engine, except for those of the adapter itself
  /// (LoraCache::admit) and of the sizes of the batch and the KV cache (Scheduler::why_never_fits). `terms`:
  /// the terms of the request's adapter.
  [[nodiscard]] Problems validate(const EngineInfo& engine, const AdapterTerms& terms) const;
  /// Returns an error that TensorRT-LLM sends as a response instead of refusing the request; empty if there
  /// is none.
  [[nodiscard]] std::string error_to_answer(std::int64_t vocab_size) const;
};

constexpr auto fields_of(const Request* /*type*/) {
  using C = Request;
  return std::tuple{
      Field{"input_token_ids", &C::input_token_ids,
            "The prompt: one token or more, with prompt_tuning_config virtual ones too. With an encoder, "
            "what the decoder begins with: as a rule the "
            "model's "
            "decoder_start_token_id."},
      Field{"max_tokens", &C::max_tokens,
            "Tokens to generate at most; 0 with pooling_params, 0 or 1 where an encoder's output is all that "
            "is "
            "asked for."},
      Field{"streaming", &C::streaming, "One response a step instead of one at the end."},
      Field{"sampling_config", &C::sampling_config, "How the next token is chosen."},
      Field{"output_config", &C::output_config, "What is returned besides the tokens."},
      Field{"end_id", &C::end_id,
            "The token that ends the generation; not part of the output. None or -1: none."},
      Field{"pad_id", &C::pad_id, "Without effect: nothing is padded."},
      Field{"position_ids", &C::position_ids, "Refused unless None: positions count from 0."},
      Field{"bad_words", &C::bad_words, "Token sequences that must not be generated."},
      Field{"stop_words", &C::stop_words, "Token sequences that end the generation; part of the output."},
      Field{"embedding_bias", &C::embedding_bias,
            "float32 [vocab_size], new tokens of the adapter included, added to the logits. One of another "
            "shape is the response's error."},
      Field{
          "external_draft_tokens_config", &C::external_draft_tokens_config,
          "Tokens that are expected right after the prompt, computed together as long as they are right; no "
          "result depends on them."},
      Field{"prompt_tuning_config", &C::prompt_tuning_config,
            "Virtual tokens of the prompt: an id of input_token_ids that follows the vocabulary, new tokens "
            "of the adapter included, is a row of its table. No other field may have such ids."},
      Field{"lora_config", &C::lora_config, "The adapter; with weights when the task may not be cached yet."},
      Field{"lookahead_config", &C::lookahead_config,
            "Drafts from the sequence's own text. None: as ExecutorConfig.decoding_config says; "
            "LookaheadDecodingConfig(1, 1, 0): none. No result depends on it."},
      Field{"kv_cache_retention_config", &C::kv_cache_retention_config,
            "How long its KV blocks should stay cached when nobody uses them; without effect where "
            "KvCacheConfig.enable_block_reuse is off."},
      Field{"logits_post_processor_name", &C::logits_post_processor_name,
            "A name of LogitsPostProcessorConfig.processor_map, or BATCHED_POST_PROCESSOR_NAME."},
      Field{"logits_post_processor", &C::logits_post_processor,
            "A function of its own instead: function(request id, logits, token ids, stream, client id)."},
      Field{"encoder_input_token_ids", &C::encoder_input_token_ids,
            "What the encoder is given: one token or more. Refused unless None where the engine has no "
            "encoder."},
      Field{"client_id", &C::client_id, "Returned in the responses."},
      Field{
          "return_all_generated_tokens", &C::return_all_generated_tokens,
          "Each streamed response has all tokens generated so far. Those of a request with beams always do, "
          "because a beam may go on as another."},
      Field{"priority", &C::priority, "0 to 1; higher starts first."},
      Field{"num_return_sequences", &C::num_return_sequences,
            "Sequences to generate from the prompt, at most max_batch_size; each has responses of its own. "
            "Sequence i draws as a request with seed + i would that has no other. "
            "SamplingConfig.num_return_sequences says the same; when both are given they are equal. With "
            "SamplingConfig.beam_width above 1: how many of the best beams are returned, in one response; 1 "
            "is all "
            "of them here, and one in SamplingConfig."},
      Field{"eagle_config", &C::eagle_config, "Refused unless None."},
      Field{"guided_decoding_params", &C::guided_decoding_params,
            "What the output has to be like; where it is complete, one of the stop tokens ends it."},
      Field{"allotted_time_ms", &C::allotted_time_ms,
            "From enqueue_request on (timedelta, or milliseconds); then the request ends as TIMED_OUT."},
      Field{"cache_salt_id", &C::cache_salt_id, "Only requests with the same salt share KV."},
      Field{"draft_lora_config", &C::draft_lora_config,
            "The adapter that the draft engine guesses with, one of its own and not of the engine; None: its "
            "base model. Not in TensorRT-LLM."},
      Field{"pooling_params", &C::pooling_params,
            "Ends the request with its prompt: Result.pooled_output has hidden states, or what is made of "
            "them, and no token is generated. max_tokens is 0 then, and what says how tokens are chosen is "
            "left as it is. Not in TensorRT-LLM."},
      Field{"token_type_ids", &C::token_type_ids,
            "The kind of each token of the prompt, where the model tells kinds apart: BERT's 0 for a first "
            "text, 1 for a second. None: all 0. Not in TensorRT-LLM."},
      Field{"request_type", &C::request_type,
            "Refused unless REQUEST_TYPE_CONTEXT_AND_GENERATION: one executor runs both phases."},
      Field{"multimodal_embedding", &C::multimodal_embedding, "Refused unless None."},
      Field{"multimodal_input", &C::multimodal_input, "Refused unless None."},
      Field{"mrope_config", &C::mrope_config, "Refused unless None."},
      Field{"context_phase_params", &C::context_phase_params, "Refused unless None."}};
}

}  // namespace adaptrt
