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

/// The part of a row of logits that is needed to choose the next token and to return log probs.
struct RowNeed {
  enum class Kind : std::uint8_t {
    kLogits,     ///< the whole row
    kHighest,    ///< num_highest logits and the row's summary (StepInput::highest)
    kBestToken,  ///< the token of the highest logit (StepInput::best_tokens)
  };
  Kind kind = Kind::kLogits;
  std::int32_t num_highest = 0;
};

/// One sequence of a request: its tokens and the data returned with them. The scheduler sees its base class.
class ActiveSequence final : public Sequence {
 public:
  /// `request` was validated, and `owner` outlives this object. Reserves room for all logits and log probs
  /// that it will return. `guide` is nullptr if there is none. has_coordinates: virtual tokens have
  /// coordinates.
  ActiveSequence(ActiveRequest& owner, std::int32_t sequence_index, const Request& request,
                 std::shared_ptr<const HostAdapter> host_adapter, std::shared_ptr<TokenGuide> guide,
                 std::int64_t vocab_size, bool has_coordinates);

  [[nodiscard]] ActiveRequest& request() const { return request_; }
  /// Returns float32 [EngineInfo::prompt_embedding_size] for a virtual prompt token; nullptr for other
  /// tokens.
  [[nodiscard]] const float* embedding_of(TokenId token) const {
    return token < vocab_size_ ? nullptr : embedding_table_.row(token - vocab_size_);
  }
  /// Position by which the token at `position` is rotated, if it has no coordinates of its own.
  [[nodiscard]] std::int32_t rotary_position_of(std::int32_t position) const;
  /// True if rotary_position_of() differs from the position for some tokens.
  [[nodiscard]] bool has_rotary_positions() const { return !position_shifts_.empty(); }
  [[nodiscard]] SamplerState& sampler() { return sampler_; }
  /// Mask of allowed next tokens, as Sampler::sample takes it. Throws StepError.
  [[nodiscard]] std::span<const std::uint32_t> allowed_tokens() {
    return guide_ ? guide_->mask() : std::span<const std::uint32_t>();
  }

  /// Returns what it needs of the row of its next token; later rows need at most as much. All sequences of a
  /// request give the same answer. This is the only place that decides which rows cross from a device.
  [[nodiscard]] RowNeed row_need() const;
  /// True if the next token is the row's best token, which the engine finds without the host. Later tokens
  /// are, too.
  [[nodiscard]] bool is_token_found_by_engine() const {
    return row_need().kind != RowNeed::Kind::kLogits && sampler_.num_highest_needed(tokens.size()) == 1;
  }

  /// Appends the next token, with the logits that it was chosen from and the most likely tokens to return.
  /// `logits` may be nullptr if the request does not return them. Returns why it is the last token;
  /// kNotFinished if it is not.
  FinishReason append(const StopCriteria& stop, const SampledToken& sampled, const float* logits,
                      std::span<const TokenLogProb> most_likely);
  /// Enables drafts. Reserves room for the outputs of several tokens per step.
  void draft_from(const DraftSources& sources, const std::shared_ptr<const HostAdapter>& draft_adapter);
  [[nodiscard]] bool has_drafter() const { return drafter_ != nullptr; }
  /// Makes the drafts of the next step, if there is a drafter. The last step verified `num_verified` of the
  /// previous drafts; `num_right` of them were right. `num_gained` is the number of tokens generated in
  /// addition to the first.
  void make_drafts(std::int32_t num_verified, std::int32_t num_right, std::int32_t num_gained);
  /// Number of drafts that the draft engine should make for the next step; 0 for none.
  [[nodiscard]] std::int32_t num_drafts_wanted() const { return drafter_ ? drafter_->num_wanted() : 0; }
  /// Records that the draft engine has filled `drafts` with at least one draft.
  void take_drafts_of_engine() { drafter_->take_drafts_of_engine(); }
  [[nodiscard]] DraftSequence& draft_sequence() { return draft_sequence_; }
  /// Number of steps that gave it a token.
  [[nodiscard]] std::int32_t num_decoding_steps() const { return num_generated() - num_gained_; }

  /// Number of drafts that steps computed, and of tokens that came from right ones.
  [[nodiscard]] std::int32_t num_computed_drafts() const { return num_computed_drafts_; }
  [[nodiscard]] std::int32_t num_gained() const { return num_gained_; }

  /// For beams: copies the generated tokens of another sequence of the request.
  void follow(const ActiveSequence& other);
  /// For beams: appends the next token, which is not the last, with the most likely tokens to return.
  void go_on_with(const ScoredToken& next, std::span<const TokenLogProb> most_likely);
  /// Log probs of the generated tokens; empty if they are not returned.
  [[nodiscard]] std::span<const float> log_probs() const { return log_probs_; }
  [[nodiscard]] std::span<const TokenLogProb> top_log_probs() const { return top_log_probs_; }

  /// True if its last token was chosen.
  [[nodiscard]] bool is_complete() const { return is_complete_; }
  /// True if its last response was made.
  [[nodiscard]] bool has_ended() const { return has_ended_; }

  /// Makes the next result of this sequence; a `reason` other than kNotFinished makes it the last.
  [[nodiscard]] Result make_result(FinishReason reason);

 private:
  /// Rotary positions minus positions, of tokens from `first` on.
  struct PositionShift {
    std::int32_t first = 0;
    std::int32_t shift = 0;
  };

  /// Reads the rotary positions of text after virtual tokens.
  void set_position_shifts();
  /// Reserves room for the logits and log probs of this many tokens, the most that are kept at a time.
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
  std::vector<PositionShift> position_shifts_;  // ascending

  bool is_complete_ = false;
  bool has_ended_ = false;
  bool ended_by_end_id_ = false;
  std::int32_t num_gained_ = 0;  // tokens that came with others of the same step
  std::int32_t num_computed_drafts_ = 0;
  std::int32_t num_sent_ = 0;  // generated tokens already sent in streamed responses
  std::vector<float> log_probs_;
  std::vector<float> generation_logits_;
  // ActiveRequest::num_most_likely() entries per token, contiguous.
  std::vector<TokenLogProb> top_log_probs_;
};

/// Splits `entries` into rows of `length`.
[[nodiscard]] std::vector<std::vector<TokenLogProb>> in_rows_of(std::size_t length,
                                                                std::span<const TokenLogProb> entries);

}  // namespace adaptrt
