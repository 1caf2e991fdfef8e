#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/draft/drafter.h"
#include "adaptrt/draft_engine/draft_engine.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/guide/token_guide.h"
#include "adaptrt/sample/beam_search.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/sampler.h"
#include "adaptrt/sample/stop.h"
#include "adaptrt/sched/sequence.h"

namespace adaptrt {

class ActiveRequest;

/// One sequence of a request: its tokens, and what is returned beside them. The scheduler sees the Sequence
/// in it.
class ActiveSequence final : public Sequence {
 public:
  /// `request` was validated and `owner` outlives this. Makes room for all logits and log probs that it will
  /// return. `guide` is nullptr unless it has one.
  ActiveSequence(ActiveRequest& owner, std::int32_t sequence_index, const Request& request,
                 std::shared_ptr<const HostAdapter> host_adapter, std::shared_ptr<TokenGuide> guide,
                 std::int64_t vocab_size);

  [[nodiscard]] ActiveRequest& request() const { return request_; }
  /// float32 [EngineInfo::given_embedding_size] of a virtual token of the prompt; nullptr for other tokens.
  [[nodiscard]] const float* embedding_of(TokenId token) const {
    return token < vocab_size_ ? nullptr : embedding_table_.row(token - vocab_size_);
  }
  [[nodiscard]] SamplerState& sampler() { return sampler_; }
  /// The tokens that the next one is chosen from, as Sampler::sample takes them. Throws StepError.
  [[nodiscard]] std::span<const std::uint32_t> allowed_tokens() {
    return guide_ ? guide_->mask() : std::span<const std::uint32_t>();
  }

  /// The next token, with the logits that it was chosen from and the most likely tokens that are returned.
  /// Returns whether, and why, it is the last.
  FinishReason append(const StopCriteria& stop, const SampledToken& sampled, const float* logits,
                      std::span<const TokenLogProb> most_likely);
  /// Has drafts made from now on. Makes room for what several tokens of a step return.
  void draft_from(const DraftSources& sources, const std::shared_ptr<const HostAdapter>& draft_adapter);
  [[nodiscard]] bool has_drafter() const { return drafter_ != nullptr; }
  /// The drafts of the next step, with a drafter. The step before computed `num_verified` of the drafts that
  /// there were, `num_right` came to be generated, and `num_gained` tokens were generated beside the first.
  void make_drafts(std::int32_t num_verified, std::int32_t num_right, std::int32_t num_gained);
  /// Drafts that the draft engine should make for the next step; 0: none.
  [[nodiscard]] std::int32_t num_drafts_wanted() const { return drafter_ ? drafter_->num_wanted() : 0; }
  /// It has made `drafts`, one or more.
  void take_drafts_of_engine() { drafter_->take_drafts_of_engine(); }
  [[nodiscard]] DraftSequence& draft_sequence() { return draft_sequence_; }
  /// Steps that gave it a token.
  [[nodiscard]] std::int32_t num_decoding_steps() const { return num_generated() - num_gained_; }

  /// For beams: takes over what another sequence of the request has generated.
  void follow(const ActiveSequence& other);
  /// For beams: the next token, which is not the last, with the most likely tokens that are returned.
  void go_on_with(const ScoredToken& next, std::span<const TokenLogProb> most_likely);
  /// Of the tokens generated; empty unless they are returned.
  [[nodiscard]] std::span<const float> log_probs() const { return log_probs_; }
  [[nodiscard]] std::span<const TokenLogProb> top_log_probs() const { return top_log_probs_; }

  /// A token was chosen that is the last.
  [[nodiscard]] bool is_complete() const { return is_complete_; }
  /// Its last response was made.
  [[nodiscard]] bool has_ended() const { return has_ended_; }

  /// What there is to send of this sequence alone; `reason` other than kNotFinished makes it the last.
  [[nodiscard]] Result make_result(FinishReason reason);

 private:
  /// Room for the logits and log probs of so many tokens, which is as many as are kept at a time.
  void reserve_outputs(std::size_t num_tokens);
  [[nodiscard]] std::int32_t num_output_tokens() const {
    return num_generated() - (ended_by_end_id_ ? 1 : 0);
  }
  [[nodiscard]] FloatTensor take_generation_logits(std::int32_t first_token);
  [[nodiscard]] std::vector<std::vector<TokenLogProb>> take_top_log_probs();

  ActiveRequest& request_;
  SamplerState sampler_;
  std::shared_ptr<TokenGuide> guide_;
  std::unique_ptr<Drafter> drafter_;
  DraftSequence draft_sequence_;
  std::int64_t vocab_size_;
  EmbeddingTable embedding_table_;

  bool is_complete_ = false;
  bool has_ended_ = false;
  bool ended_by_end_id_ = false;
  std::int32_t num_gained_ = 0;  // tokens that came with others of the same step
  std::int32_t num_sent_ = 0;    // generated tokens that streamed responses have told of
  std::vector<float> log_probs_;
  std::vector<float> generation_logits_;
  // ActiveRequest::num_most_likely() a token, back to back.
  std::vector<TokenLogProb> top_log_probs_;
};

/// `entries` cut into rows of `length`.
[[nodiscard]] std::vector<std::vector<TokenLogProb>> in_rows_of(std::size_t length,
                                                                std::span<const TokenLogProb> entries);

}  // namespace adaptrt
