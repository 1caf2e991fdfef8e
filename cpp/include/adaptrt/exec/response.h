#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/fields.h"
#include "adaptrt/exec/float_tensor.h"
#include "adaptrt/exec/perf_metrics.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/stop.h"

namespace adaptrt {

/// TensorRT-LLM's Result, with log probs of more tokens than the sampled ones. It belongs to one sequence of
/// its request, or to all of its beams, best first. Without beam search a sequence is one beam. All log probs
/// come from LogSoftmax.
struct Result {
  bool is_final = false;
  std::vector<std::vector<TokenId>> output_token_ids;
  std::optional<std::vector<float>> cum_log_probs;
  std::optional<std::vector<std::vector<float>>> log_probs;
  std::optional<FloatTensor> context_logits;
  std::optional<FloatTensor> generation_logits;
  std::optional<FloatTensor> encoder_output;
  std::vector<FinishReason> finish_reasons;
  std::int32_t sequence_index = 0;
  bool is_sequence_final = false;
  std::int32_t decoding_iter = 0;
  std::optional<RequestPerfMetrics> request_perf_metrics;
  std::optional<std::vector<std::vector<std::vector<TokenLogProb>>>> top_log_probs;
  std::optional<std::vector<float>> prompt_log_probs;
  std::optional<std::vector<std::vector<TokenLogProb>>> prompt_top_log_probs;
  std::optional<FloatTensor> pooled_output;
  Unsupported additional_outputs;
  Unsupported context_phase_params;
  std::int32_t num_cached_tokens = 0;
};

constexpr auto fields_of(const Result* /*type*/) {
  using C = Result;
  return FieldList{
      Field{"is_final", &C::is_final, "True in the request's last response."},
      Field{"output_token_ids", &C::output_token_ids,
            "[beams][tokens]. Without streaming: the prompt, unless excluded, and the generated tokens. With "
            "streaming: the new tokens, or all generated ones with return_all_generated_tokens or several "
            "beams (the best so far)."},
      Field{"cum_log_probs", &C::cum_log_probs,
            "[beams], the sum of log_probs. With SamplingConfig.beam_width above 1: the beam's score before "
            "length_penalty, which is the sum of its tokens' log probs after temperature, bias and "
            "penalties, including the end_id's."},
      Field{"log_probs", &C::log_probs,
            "[beams][tokens], for all tokens generated so far, also with streaming: natural logarithms of "
            "the softmax over the row of generation_logits, before bias, penalties and temperature."},
      Field{"context_logits", &C::context_logits,
            "float32 [prompt length, vocab_size], in the results of every sequence."},
      Field{"generation_logits", &C::generation_logits,
            "float32 [1, tokens, vocab_size], with streaming [tokens, 1, vocab_size]: the rows "
            "that this response's "
            "generated tokens were chosen from, before bias, penalties and temperature."},
      Field{"encoder_output", &C::encoder_output,
            "float32 [encoder input length, hidden size]: output of the encoder for the request's encoder "
            "input, or for its prompt in an encoder-only engine. None if the request ended earlier."},
      Field{"finish_reasons", &C::finish_reasons, "[beams]."},
      Field{"sequence_index", &C::sequence_index,
            "Index of the sequence in the request: 0 to num_return_sequences - 1."},
      Field{"is_sequence_final", &C::is_sequence_final, "True in the sequence's last response."},
      Field{"decoding_iter", &C::decoding_iter, "Number of steps so far that gave the sequence a token."},
      Field{"request_perf_metrics", &C::request_perf_metrics,
            "Times, KV cache blocks and drafts of the request so far, in all results of a request with "
            "OutputConfig.return_perf_metrics; None without it."},
      Field{"top_log_probs", &C::top_log_probs,
            "[beams][tokens][OutputConfig.top_log_probs, or the vocabulary size if smaller] of (token id, "
            "log prob) as in log_probs: the most likely tokens, most likely first, equal logits by id. For "
            "the generated tokens in output_token_ids: with streaming the new ones, or all with "
            "return_all_generated_tokens."},
      Field{"prompt_log_probs", &C::prompt_log_probs,
            "[prompt length - 1]: log probs of the prompt's tokens from the second on, each given the "
            "earlier ones. Only in results with sequence_index 0, with streaming only in the first response. "
            "None if the request ended before its prompt was computed."},
      Field{"prompt_top_log_probs", &C::prompt_top_log_probs,
            "[prompt length - 1][most likely tokens] as in top_log_probs, for the positions of "
            "prompt_log_probs; needs OutputConfig.top_log_probs."},
      Field{"pooled_output", &C::pooled_output,
            "float32 [width], or [prompt length, width] with PoolingType.ALL: the result of "
            "Request.pooling_params. The width is hidden_size, or the number of outputs of the last of "
            "PoolingParams.layers. None if the request ended before its prompt was computed."},
      Field{"additional_outputs", &C::additional_outputs, "Always None."},
      Field{"context_phase_params", &C::context_phase_params, "Always None."},
      Field{"num_cached_tokens", &C::num_cached_tokens,
            "Number of first prompt tokens that were not computed when the request started, because their KV "
            "and states were reused: full blocks, beginnings of blocks, and blocks of the second level. A "
            "later start after a preemption does not change it. The same for all sequences. Not in "
            "TensorRT-LLM."}};
}

/// TensorRT-LLM's Response: a result or an error.
struct Response {
  RequestId request_id = 0;
  std::optional<std::uint64_t> client_id;
  /// Empty if `result` is valid.
  std::string error_msg;
  Result result;

  [[nodiscard]] bool has_error() const { return !error_msg.empty(); }
  [[nodiscard]] bool is_final() const { return has_error() || result.is_final; }
};

}  // namespace adaptrt
