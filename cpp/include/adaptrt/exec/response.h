#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "adaptrt/core/fields.h"
#include "adaptrt/exec/float_tensor.h"
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
  Unsupported request_perf_metrics;
  std::optional<std::vector<std::vector<std::vector<TokenLogProb>>>> top_log_probs;
  std::optional<std::vector<float>> prompt_log_probs;
  std::optional<std::vector<std::vector<TokenLogProb>>> prompt_top_log_probs;
  std::optional<FloatTensor> pooled_output;
  Unsupported additional_outputs;
  Unsupported context_phase_params;
};

constexpr auto fields_of(const Result* /*type*/) {
  using C = Result;
  return std::tuple{
      Field{"is_final", &C::is_final, "No response of the request follows."},
      Field{"output_token_ids", &C::output_token_ids,
            "[beams][tokens]. Without streaming: the prompt, unless excluded, and what was "
            "generated. With streaming: what "
            "is new, or all that was generated with return_all_generated_tokens or several "
            "beams, the best so far."},
      Field{"cum_log_probs", &C::cum_log_probs,
            "[beams], the sum of log_probs; with SamplingConfig.beam_width above 1 the beam's "
            "score before length_penalty: the sum of its tokens' log probs after temperature, bias "
            "and penalties, that of the end_id included."},
      Field{"log_probs", &C::log_probs,
            "[beams][tokens], of all tokens generated so far, with streaming too: natural "
            "logarithms of the softmax over the row of generation_logits, whatever bias, "
            "penalties and temperature do to it afterwards."},
      Field{"context_logits", &C::context_logits,
            "float32 [prompt length, vocab_size]. With every sequence."},
      Field{"generation_logits", &C::generation_logits,
            "float32 [1, tokens, vocab_size], with streaming [tokens, 1, vocab_size]: the rows "
            "that this response's "
            "generated tokens were chosen from, before bias, penalties and temperature."},
      Field{
          "encoder_output", &C::encoder_output,
          "float32 [encoder input length, hidden size]: what the encoder made of the request's input, or of "
          "its prompt where the engine is an encoder alone. None if the request ended before."},
      Field{"finish_reasons", &C::finish_reasons, "[beams]."},
      Field{"sequence_index", &C::sequence_index,
            "Which of the request's sequences this is of: 0 to num_return_sequences - 1."},
      Field{"is_sequence_final", &C::is_sequence_final, "No response of the sequence follows."},
      Field{"decoding_iter", &C::decoding_iter, "Steps that gave the sequence a token so far."},
      Field{"request_perf_metrics", &C::request_perf_metrics, "Always None."},
      Field{"top_log_probs", &C::top_log_probs,
            "[beams][tokens][OutputConfig.top_log_probs, or the vocabulary's size if that is less] "
            "of (token id, log prob) as in log_probs: the most likely tokens, the likeliest "
            "first, of equal logits the lowest id first. Of the generated tokens in "
            "output_token_ids: with streaming of what is new, or of all that was generated "
            "with return_all_generated_tokens."},
      Field{"prompt_log_probs", &C::prompt_log_probs,
            "[prompt length - 1], of the prompt's tokens from the second on, each given those "
            "before it. With streaming in the first response only; None if the request ended "
            "before its prompt was computed. With sequence_index 0 only."},
      Field{"prompt_top_log_probs", &C::prompt_top_log_probs,
            "[prompt length - 1][most likely tokens] as in top_log_probs: beside "
            "prompt_log_probs, with OutputConfig.top_log_probs."},
      Field{
          "pooled_output", &C::pooled_output,
          "float32 [width], or [prompt length, width] with PoolingType.ALL: what Request.pooling_params ask "
          "for; the width is hidden_size, or the outputs of the last of PoolingParams.layers. None if the "
          "request ended before its prompt was computed."},
      Field{"additional_outputs", &C::additional_outputs, "Always None."},
      Field{"context_phase_params", &C::context_phase_params, "Always None."}};
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
