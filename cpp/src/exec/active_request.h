#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/sample/sampler.h"
#include "adaptrt/sample/stop.h"
#include "adaptrt/sched/sequence.h"

namespace adaptrt {

using Clock = std::chrono::steady_clock;

/// A request from its admission to its last response. The scheduler sees the Sequence in it.
class ActiveRequest final : public Sequence {
 public:
  /// `request` was validated. Makes room for all logits that it will return.
  ActiveRequest(RequestId request_id, const Request& request, std::shared_ptr<const HostAdapter> host_adapter,
                std::int64_t vocab_size);

  /// The prompt's position whose logits are returned next; prompt_length when none are.
  [[nodiscard]] std::int32_t next_context_logits() const { return next_context_logits_; }
  [[nodiscard]] bool wants_generation_logits() const { return output_.return_generation_logits; }
  [[nodiscard]] bool wants_log_probs() const { return output_.return_log_probs; }
  [[nodiscard]] SamplerState& sampler() { return sampler_; }
  [[nodiscard]] const std::optional<Clock::time_point>& deadline() const { return deadline_; }

  /// Logits of the prompt's position next_context_logits().
  void add_context_logits(const float* logits);
  /// The next token, with the logits that it was chosen from. Returns whether, and why, it is the last.
  FinishReason append(const SampledToken& sampled, const float* logits);

  [[nodiscard]] bool is_streaming() const { return streaming_; }
  /// What there is to send; `reason` other than kNotFinished makes it the last response.
  [[nodiscard]] Response make_response(FinishReason reason);
  [[nodiscard]] Response make_error(std::string reason) const;

  /// Began to run, so that it does not count as queued any more.
  bool has_started = false;

 private:
  [[nodiscard]] std::int32_t num_output_tokens() const {
    return num_generated() - (ended_by_end_id_ ? 1 : 0);
  }
  [[nodiscard]] FloatTensor take_generation_logits(std::int32_t first_token);

  OutputConfig output_;
  bool streaming_;
  bool return_all_generated_tokens_;
  std::optional<std::uint64_t> client_id_;
  std::optional<Clock::time_point> deadline_;
  StopCriteria stop_;
  SamplerState sampler_;
  std::int64_t vocab_size_;

  bool ended_by_end_id_ = false;
  std::int32_t num_sent_ = 0;  // generated tokens that streamed responses have told of
  std::vector<float> log_probs_;
  std::int32_t next_context_logits_;
  std::shared_ptr<std::vector<float>> context_logits_;
  std::vector<float> generation_logits_;
};

}  // namespace adaptrt
