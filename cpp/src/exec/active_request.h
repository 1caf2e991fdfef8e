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
#include "adaptrt/exec/perf_metrics.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/guide/token_guide.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/stop.h"
#include "pooler.h"

namespace adaptrt {

using Clock = std::chrono::steady_clock;

/// The post-processor of a request's logits.
struct PostProcessorOfRequest {
  std::shared_ptr<LogitsPostProcessor> processor;  ///< nullptr for none
  bool is_batched = false;
};

/// A request from its admission to its last response: its sequences and the data that they share.
class ActiveRequest {
 public:
  /// `request` was validated. Reserves room for all logits and log probs that it will return. `guides` has
  /// one guide per sequence, or is empty.
  ActiveRequest(RequestId request_id, const Request& request,
                const std::shared_ptr<const HostAdapter>& host_adapter,
                std::vector<std::shared_ptr<TokenGuide>> guides, PostProcessorOfRequest post_processor,
                const EngineInfo& engine);
  ActiveRequest(const ActiveRequest&) = delete;
  ActiveRequest& operator=(const ActiveRequest&) = delete;

  /// Sets the sources of drafts, before the request begins. No effect if there are none, or if the request
  /// has a post-processor: that is called once a step with the tokens generated so far. `draft_adapter` is
  /// the draft engine's adapter; nullptr for none.
  void draft_from(const DraftSources& sources, const std::shared_ptr<const HostAdapter>& draft_adapter);

  [[nodiscard]] RequestId id() const { return id_; }
  [[nodiscard]] const std::optional<std::uint64_t>& client_id() const { return client_id_; }
  [[nodiscard]] const std::optional<Clock::time_point>& deadline() const { return deadline_; }
  /// nullptr for the base model.
  [[nodiscard]] const HostAdapter* adapter() const { return first().adapter.get(); }
  /// Vocabulary size of the engine, plus the adapter's new tokens.
  [[nodiscard]] std::int64_t vocab_size() const { return vocab_size_; }
  /// Sequences by index. The first one computes the prompt; the others are forked from it.
  [[nodiscard]] std::span<const std::unique_ptr<ActiveSequence>> sequences() const { return sequences_; }
  [[nodiscard]] ActiveSequence& first() const { return *sequences_.front(); }
  /// The search of a request with beams; nullptr for others.
  [[nodiscard]] ActiveBeams* beams() const { return beams_.get(); }
  /// The consumer of the prompt's hidden states, for a request that returns rows; nullptr for others.
  [[nodiscard]] Pooler* pooler() const { return pooler_.get(); }
  /// Type of each prompt token; empty if all are 0.
  [[nodiscard]] std::span<const std::int32_t> token_types() const { return token_types_; }

  [[nodiscard]] bool is_streaming() const { return streaming_; }
  [[nodiscard]] bool wants_generation_logits() const { return output_.return_generation_logits; }
  [[nodiscard]] bool wants_log_probs() const { return output_.return_log_probs; }
  /// Number of most likely tokens returned for each generated token, and for each prompt token.
  [[nodiscard]] std::size_t num_most_likely() const { return num_most_likely_; }
  /// True if each response contains only new tokens, so that sent ones need not be kept.
  [[nodiscard]] bool sends_each_token_once() const { return streaming_ && !return_all_generated_tokens_; }
  [[nodiscard]] bool has_prompt_in_output() const {
    return !streaming_ && !output_.exclude_input_from_output;
  }
  [[nodiscard]] const StopCriteria& stop() const { return stop_; }
  [[nodiscard]] const PostProcessorOfRequest& post_processor() const { return post_processor_; }

  /// The prompt positions [next_prompt_row(), end_of_prompt_rows()) still need their rows of logits.
  [[nodiscard]] std::int32_t next_prompt_row() const { return next_prompt_row_; }
  [[nodiscard]] std::int32_t end_of_prompt_rows() const { return end_of_prompt_rows_; }
  /// Adds the logits of prompt position next_prompt_row(). Throws StepError if log probs are wanted but the
  /// logits are NaN or infinite.
  void add_prompt_row(const float* logits);

  /// Returns the buffer for the encoder's output; nullptr if it is not wanted or already filled.
  [[nodiscard]] float* encoder_output_to_fill();
  /// Records that a step has filled the encoder output.
  void has_encoder_output() { encoder_output_is_there_ = true; }

  /// Records the start of the request by a step that began at `time`, after its first sequence got its
  /// memory. Returns false if it has started before.
  bool start(Clock::time_point time);
  /// Records that step `iteration` gave the request tokens.
  void note_tokens(Clock::time_point time, std::int64_t iteration);

  /// Makes the next response of a sequence. A `reason` other than kNotFinished makes it the sequence's last
  /// response, and the request's last if its other sequences had theirs. With beams, the first sequence
  /// stands for all. The end of the search then makes it the last response for any `reason`.
  [[nodiscard]] Response make_response(ActiveSequence& sequence, FinishReason reason);
  [[nodiscard]] Response make_error(std::string reason) const;

  const Clock::time_point arrival = Clock::now();
  /// True if it has begun to run and no longer counts as queued.
  bool has_started = false;
  /// True if its last response, or an error, was made.
  bool has_ended = false;
  /// Used to count requests by their sequences: the newest step that counted it, and the kind counted.
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
  [[nodiscard]] RequestPerfMetrics perf_metrics() const;
  /// Moves them into the first response after the prompt's last row.
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
  std::unique_ptr<Pooler> pooler_;
  std::vector<std::int32_t> token_types_;
  /// True if the engine is an encoder and the request returns its output.
  bool pools_encoder_output_ = false;

  std::int32_t num_sequences_left_;  // 1 with beams: their results come together
  std::int32_t next_prompt_row_ = 0;
  std::int32_t end_of_prompt_rows_ = 0;
  std::shared_ptr<std::vector<float>> context_logits_;
  std::optional<std::vector<float>> prompt_log_probs_;  // until they are sent
  std::vector<TokenLogProb> prompt_top_log_probs_;
  /// [encoder input length, encoder_hidden_size_]; nullptr if it is not wanted.
  std::shared_ptr<std::vector<float>> encoder_output_;
  std::int64_t encoder_hidden_size_;
  bool encoder_output_is_there_ = false;
  std::int32_t num_cached_tokens_ = 0;
  Clock::time_point start_{};
  Clock::time_point first_token_{};
  Clock::time_point newest_token_{};
  std::optional<std::uint64_t> first_token_step_;
  std::optional<std::uint64_t> newest_token_step_;
};

/// A request's part of the KvCacheStats counters so far, with the blocks of its encoder input.
struct BlockCounts {
  std::int64_t alloc_new_blocks = 0;
  std::int64_t reused_blocks = 0;
  std::int64_t missed_blocks = 0;

  /// reused / (reused + missed); 0 without any.
  [[nodiscard]] double hit_rate() const;
};
[[nodiscard]] BlockCounts count_blocks(const ActiveRequest& request);

/// Returns nullopt if there is none.
[[nodiscard]] std::optional<TokenId> end_id_of(const Request& request);

}  // namespace adaptrt
