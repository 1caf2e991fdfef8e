#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "active_beams.h"
#include "active_sequence.h"
#include "adaptrt/exec/logits_post_processor.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/guide/token_guide.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/stop.h"

namespace adaptrt {

using Clock = std::chrono::steady_clock;

/// What changes the logits that a request's tokens are chosen from.
struct PostProcessorOfRequest {
  std::shared_ptr<LogitsPostProcessor> processor;  ///< nullptr: nothing does
  bool is_batched = false;
};

/// A request from its admission to its last response: its sequences, and what they have in common.
class ActiveRequest {
 public:
  /// `request` was validated. Makes room for all logits and log probs that it will return. `guides`: one for
  /// each of its sequences, or none.
  ActiveRequest(RequestId request_id, const Request& request,
                const std::shared_ptr<const HostAdapter>& host_adapter,
                std::vector<std::shared_ptr<TokenGuide>> guides, PostProcessorOfRequest post_processor,
                std::int64_t vocab_size);
  ActiveRequest(const ActiveRequest&) = delete;
  ActiveRequest& operator=(const ActiveRequest&) = delete;

  [[nodiscard]] RequestId id() const { return id_; }
  [[nodiscard]] const std::optional<std::uint64_t>& client_id() const { return client_id_; }
  [[nodiscard]] const std::optional<Clock::time_point>& deadline() const { return deadline_; }
  /// nullptr: the base model.
  [[nodiscard]] const HostAdapter* adapter() const { return first().adapter.get(); }
  /// In the order of their indices. The first computes the prompt, the others are forked from it.
  [[nodiscard]] std::span<const std::unique_ptr<ActiveSequence>> sequences() const { return sequences_; }
  [[nodiscard]] ActiveSequence& first() const { return *sequences_.front(); }
  /// The search whose beams the sequences are; nullptr without one.
  [[nodiscard]] ActiveBeams* beams() const { return beams_.get(); }

  [[nodiscard]] bool is_streaming() const { return streaming_; }
  [[nodiscard]] bool wants_generation_logits() const { return output_.return_generation_logits; }
  [[nodiscard]] bool wants_log_probs() const { return output_.return_log_probs; }
  /// How many of the most likely tokens are wanted beside each generated one, and each of the prompt.
  [[nodiscard]] std::size_t num_most_likely() const { return num_most_likely_; }
  /// Responses have what is new since the one before, so that it need not be kept.
  [[nodiscard]] bool sends_each_token_once() const { return streaming_ && !return_all_generated_tokens_; }
  [[nodiscard]] bool has_prompt_in_output() const {
    return !streaming_ && !output_.exclude_input_from_output;
  }
  [[nodiscard]] const StopCriteria& stop() const { return stop_; }
  [[nodiscard]] const PostProcessorOfRequest& post_processor() const { return post_processor_; }

  /// The prompt's positions whose rows of logits are still wanted: from the first to before the second.
  [[nodiscard]] std::int32_t next_prompt_row() const { return next_prompt_row_; }
  [[nodiscard]] std::int32_t end_of_prompt_rows() const { return end_of_prompt_rows_; }
  /// Logits of the prompt's position next_prompt_row(). Throws StepError when log probs are wanted and there
  /// are none, because logits are NaN or infinity.
  void add_prompt_row(const float* logits);

  /// What there is to send of a sequence; `reason` other than kNotFinished makes it the sequence's last
  /// response, and the request's last when its other sequences had theirs. With beams the first sequence
  /// stands for all of them, and a search that is over makes it the last response whatever the reason.
  [[nodiscard]] Response make_response(ActiveSequence& sequence, FinishReason reason);
  [[nodiscard]] Response make_error(std::string reason) const;

  const Clock::time_point arrival = Clock::now();
  /// Began to run, so that it does not count as queued any more.
  bool has_started = false;
  /// Its last response, or an error, was made.
  bool has_ended = false;
  /// For counting requests by their sequences: the newest step that counted it, and as what.
  struct Counted {
    std::int64_t step = -1;
    bool is_active = false;
    bool is_scheduled = false;
    bool is_context = false;
    bool is_generation = false;
  };
  Counted counted;

 private:
  void add_prompt_log_probs(std::int32_t position, const float* logits);
  /// Into the first response after the prompt's last row.
  void move_prompt_log_probs(Result& result);

  RequestId id_;
  OutputConfig output_;
  bool streaming_;
  bool return_all_generated_tokens_;
  std::optional<std::uint64_t> client_id_;
  std::optional<Clock::time_point> deadline_;
  StopCriteria stop_;
  PostProcessorOfRequest post_processor_;
  std::int64_t vocab_size_;
  std::size_t num_most_likely_;
  std::vector<std::unique_ptr<ActiveSequence>> sequences_;
  std::unique_ptr<ActiveBeams> beams_;

  std::int32_t num_sequences_left_;  // 1 with beams, whose results come together
  std::int32_t next_prompt_row_ = 0;
  std::int32_t end_of_prompt_rows_ = 0;
  std::shared_ptr<std::vector<float>> context_logits_;
  std::optional<std::vector<float>> prompt_log_probs_;  // until they are sent
  std::vector<TokenLogProb> prompt_top_log_probs_;
};

/// nullopt: none.
[[nodiscard]] std::optional<TokenId> end_id_of(const Request& request);

}  // namespace adaptrt
