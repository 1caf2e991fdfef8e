#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/exec/logits_post_processor.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/guide/token_guide.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/sampler.h"
#include "adaptrt/sample/stop.h"
#include "adaptrt/sched/sequence.h"

namespace adaptrt {

using Clock = std::chrono::steady_clock;

/// What changes the logits that a request's tokens are chosen from.
struct PostProcessorOfRequest {
  std::shared_ptr<LogitsPostProcessor> processor;  ///< nullptr: nothing does
  bool is_batched = false;
};

/// A request from its admission to its last response. The scheduler sees the Sequence in it.
class ActiveRequest final : public Sequence {
 public:
  /// `request` was validated. Makes room for all logits and log probs that it will return.
  /// `guide` is nullptr unless it has one.
  ActiveRequest(RequestId request_id, const Request& request, std::shared_ptr<const HostAdapter> host_adapter,
                std::shared_ptr<TokenGuide> guide, PostProcessorOfRequest post_processor,
                std::int64_t vocab_size);

  /// The prompt's positions whose rows of logits are still wanted: from the first to before the second.
  [[nodiscard]] std::int32_t next_prompt_row() const { return next_prompt_row_; }
  [[nodiscard]] std::int32_t end_of_prompt_rows() const { return end_of_prompt_rows_; }
  [[nodiscard]] bool wants_generation_logits() const { return output_.return_generation_logits; }
  [[nodiscard]] bool wants_log_probs() const { return output_.return_log_probs; }
  /// How many of the most likely tokens are wanted beside each generated one, and each of the prompt.
  [[nodiscard]] std::size_t num_most_likely() const { return num_most_likely_; }
  [[nodiscard]] SamplerState& sampler() { return sampler_; }
  /// The tokens that the next one is chosen from, as Sampler::sample takes them. Throws StepError.
  [[nodiscard]] std::span<const std::uint32_t> allowed_tokens() {
    return guide_ ? guide_->mask() : std::span<const std::uint32_t>();
  }
  [[nodiscard]] const PostProcessorOfRequest& post_processor() const { return post_processor_; }
  [[nodiscard]] const std::optional<std::uint64_t>& client_id() const { return client_id_; }
  [[nodiscard]] const std::optional<Clock::time_point>& deadline() const { return deadline_; }

  /// Logits of the prompt's position next_prompt_row(). Throws StepError when log probs are wanted and there
  /// are none, because logits are NaN or infinity.
  void add_prompt_row(const float* logits);
  /// The next token, with the logits that it was chosen from and their num_most_likely() tokens. Returns
  /// whether, and why, it is the last.
  FinishReason append(const SampledToken& sampled, const float* logits,
                      std::span<const TokenLogProb> most_likely);

  [[nodiscard]] bool is_streaming() const { return streaming_; }
  /// What there is to send; `reason` other than kNotFinished makes it the last response.
  [[nodiscard]] Response make_response(FinishReason reason);
  [[nodiscard]] Response make_error(std::string reason) const;

  const Clock::time_point arrival = Clock::now();
  /// Began to run, so that it does not count as queued any more.
  bool has_started = false;

 private:
  [[nodiscard]] std::int32_t num_output_tokens() const {
    return num_generated() - (ended_by_end_id_ ? 1 : 0);
  }
  void add_prompt_log_probs(std::int32_t position, const float* logits);
  [[nodiscard]] FloatTensor take_generation_logits(std::int32_t first_token);
  [[nodiscard]] std::vector<std::vector<TokenLogProb>> take_top_log_probs();
  /// Into the first response after the prompt's last row.
  void move_prompt_log_probs(Result& result);
  /// Responses have what is new since the one before, so that it need not be kept.
  [[nodiscard]] bool sends_each_token_once() const { return streaming_ && !return_all_generated_tokens_; }

  OutputConfig output_;
  bool streaming_;
  bool return_all_generated_tokens_;
  std::optional<std::uint64_t> client_id_;
  std::optional<Clock::time_point> deadline_;
  StopCriteria stop_;
  SamplerState sampler_;
  std::shared_ptr<TokenGuide> guide_;
  PostProcessorOfRequest post_processor_;
  std::int64_t vocab_size_;
  std::size_t num_most_likely_;

  bool ended_by_end_id_ = false;
  std::int32_t num_sent_ = 0;  // generated tokens that streamed responses have told of
  std::vector<float> log_probs_;
  std::int32_t next_prompt_row_ = 0;
  std::int32_t end_of_prompt_rows_ = 0;
  std::shared_ptr<std::vector<float>> context_logits_;
  std::vector<float> generation_logits_;
  // num_most_likely_ a token, back to back.
  std::vector<TokenLogProb> top_log_probs_;
  std::optional<std::vector<float>> prompt_log_probs_;  // until they are sent
  std::vector<TokenLogProb> prompt_top_log_probs_;
};

}  // namespace adaptrt
