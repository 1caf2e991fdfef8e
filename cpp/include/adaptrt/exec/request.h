#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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
  return FieldList{
      Field{"return_log_probs", &C::return_log_probs, "Result.log_probs and cum_log_probs."},
      Field{"return_context_logits", &C::return_context_logits,
            "Return Result.context_logits. The whole prompt is then computed, even if its KV is cached."},
      Field{"return_generation_logits", &C::return_generation_logits, "Result.generation_logits."},
      Field{"exclude_input_from_output", &C::exclude_input_from_output,
            "Leave the prompt out of Result.output_token_ids. Streamed responses never have it."},
      Field{"return_encoder_output", &C::return_encoder_output,
            "Return Result.encoder_output. Refused when True if the engine has no encoder. For an "
            "encoder-only engine, a request without pooling_params needs it."},
      Field{"return_perf_metrics", &C::return_perf_metrics, "Return Result.request_perf_metrics."},
      Field{"additional_model_outputs", &C::additional_model_outputs, "Refused unless None."},
      Field{"top_log_probs", &C::top_log_probs,
            "Number of most likely tokens in Result.top_log_probs, 0 to 20; 0: none. With "
            "return_prompt_log_probs also in Result.prompt_top_log_probs. Not in TensorRT-LLM."},
      Field{"return_prompt_log_probs", &C::return_prompt_log_probs,
            "Return Result.prompt_log_probs. The whole prompt is then computed, even if its KV is cached; "
            "its logits are not kept. NaN for virtual tokens. Not in TensorRT-LLM."}};
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
  /// (LoraCache::admit) and of the sizes of the batch and the KV cache (Scheduler::check_capacity). `terms`:
  /// the terms of the request's adapter.
  [[nodiscard]] Problems validate(const EngineInfo& engine, const AdapterTerms& terms) const;
  /// Returns an error that TensorRT-LLM sends as a response instead of refusing the request; empty if there
  /// is none.
  [[nodiscard]] std::string error_to_answer(std::int64_t vocab_size) const;
};

constexpr auto fields_of(const Request* /*type*/) {
  using C = Request;
  return FieldList{
      Field{"input_token_ids", &C::input_token_ids,
            "The prompt: at least one token; with prompt_tuning_config also virtual tokens. With an encoder, "
            "the decoder's first tokens, usually the model's decoder_start_token_id."},
      Field{"max_tokens", &C::max_tokens,
            "Maximum number of tokens to generate; 0 with pooling_params, 0 or 1 if only the encoder's "
            "output is wanted."},
      Field{"streaming", &C::streaming, "Send a response after each step instead of one at the end."},
      Field{"sampling_config", &C::sampling_config, "Choice of the next token."},
      Field{"output_config", &C::output_config, "Outputs in addition to the tokens."},
      Field{"end_id", &C::end_id,
            "The token that ends the generation; not part of the output. None or -1: none."},
      Field{"pad_id", &C::pad_id, "No effect: nothing is padded."},
      Field{"position_ids", &C::position_ids, "Refused unless None: positions count from 0."},
      Field{"bad_words", &C::bad_words, "Token sequences that must not be generated."},
      Field{"stop_words", &C::stop_words, "Token sequences that end the generation; part of the output."},
      Field{"embedding_bias", &C::embedding_bias,
            "float32 [vocab_size], including the adapter's new tokens, added to the logits. A wrong shape "
            "gives an error response."},
      Field{"external_draft_tokens_config", &C::external_draft_tokens_config,
            "Draft tokens for the position right after the prompt. Results do not change."},
      Field{"prompt_tuning_config", &C::prompt_tuning_config,
            "Virtual tokens of the prompt: an id in input_token_ids beyond the vocabulary (including the "
            "adapter's new tokens) is a row of the table. No other field may have such ids."},
      Field{"lora_config", &C::lora_config, "The adapter; with weights when the task may not be cached yet."},
      Field{"lookahead_config", &C::lookahead_config,
            "Drafts from the sequence's own text. None: use ExecutorConfig.decoding_config; "
            "LookaheadDecodingConfig(1, 1, 0): no drafts. Results do not change."},
      Field{"kv_cache_retention_config", &C::kv_cache_retention_config,
            "Retention of its unused KV blocks in the cache; no effect if KvCacheConfig.enable_block_reuse "
            "is off."},
      Field{"logits_post_processor_name", &C::logits_post_processor_name,
            "A name of LogitsPostProcessorConfig.processor_map, or BATCHED_POST_PROCESSOR_NAME."},
      Field{
          "logits_post_processor", &C::logits_post_processor,
          "A function for this request instead: function(request id, logits, token ids, stream, client id)."},
      Field{"encoder_input_token_ids", &C::encoder_input_token_ids,
            "Input of the encoder: at least one token. Refused unless None if the engine has no encoder."},
      Field{"client_id", &C::client_id, "Returned in the responses."},
      Field{"return_all_generated_tokens", &C::return_all_generated_tokens,
            "Each streamed response has all tokens generated so far. With beam search this is always so, "
            "because a beam may continue from another one."},
      Field{"priority", &C::priority, "0 to 1; higher starts first."},
      Field{"num_return_sequences", &C::num_return_sequences,
            "Number of sequences to generate from the prompt, at most max_batch_size; each has its own "
            "responses. Sequence i equals a single-sequence request with seed + i. "
            "SamplingConfig.num_return_sequences has the same meaning; if both are given, they must be "
            "equal. With SamplingConfig.beam_width above 1: number of best beams to return, in one response; "
            "here 1 means all of them, in SamplingConfig it means one."},
      Field{"eagle_config", &C::eagle_config, "Refused unless None."},
      Field{"guided_decoding_params", &C::guided_decoding_params,
            "Guide that the output must follow. A stop token ends the output when the guide is complete."},
      Field{"allotted_time_ms", &C::allotted_time_ms,
            "Time limit from enqueue_request on (timedelta or milliseconds); the request then ends as "
            "TIMED_OUT."},
      Field{"cache_salt_id", &C::cache_salt_id, "Only requests with the same salt share KV."},
      Field{"draft_lora_config", &C::draft_lora_config,
            "Adapter of the draft engine, made for that engine; None: its base model. Not in TensorRT-LLM."},
      Field{"pooling_params", &C::pooling_params,
            "Return pooled hidden states of the prompt in Result.pooled_output and generate no tokens. "
            "max_tokens must be 0, and sampling options must keep their defaults. Not in TensorRT-LLM."},
      Field{"token_type_ids", &C::token_type_ids,
            "Type of each prompt token, for models with token types: for BERT 0 in the first text and 1 in "
            "the second. None: all 0. Not in TensorRT-LLM."},
      Field{"request_type", &C::request_type,
            "Refused unless REQUEST_TYPE_CONTEXT_AND_GENERATION: one executor runs both phases."},
      Field{"multimodal_embedding", &C::multimodal_embedding,
            "Rows [rows, hidden_size] that stand in their order for the tokens after the vocabulary; refused "
            "for models whose rows have coordinates."},
      Field{"multimodal_input", &C::multimodal_input,
            "Places of multimodal_embedding's rows; refused without it."},
      Field{"mrope_config", &C::mrope_config, "Refused unless None."},
      Field{"context_phase_params", &C::context_phase_params, "Refused unless None."}};
}

}  // namespace adaptrt
