#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "active_sequence.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/sample/beam_search.h"
#include "adaptrt/sample/sampler.h"
#include "adaptrt/sample/stop.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

/// The search of a request with beams: which sequence is which beam, and what is returned of those that have
/// ended.
///
/// All sequences of the request run from its first token on until the search is over. A beam that has one
/// successor or more stays in its sequence with the first of them; the others go on in sequences whose beams
/// have none. Where fewer beams go on than there are sequences, because no more tokens are allowed, the rest
/// follow the best beam as idle ones: computed, and in no candidate.
class ActiveBeams {
 public:
  /// `request` was validated; `sequences` are all of its beam_width, and outlive this.
  ActiveBeams(const Request& request, std::span<const std::unique_ptr<ActiveSequence>> sequences,
              const StopCriteria& stop, std::size_t num_most_likely);

  /// Takes the row of logits after a sequence. Returns whether it was the last of them: then advance() is
  /// due. Throws StepError.
  [[nodiscard]] bool take(ActiveSequence& sequence, const float* logits, Sampler& sampler);
  /// When the step that computed the last of them was committed: the sequences get their next tokens, unless
  /// the search is over.
  void advance();
  /// What advance() has made of sequences whose beams have no successor, and of those that begin now.
  [[nodiscard]] std::span<const BeamMove> moves() const { return moves_; }
  [[nodiscard]] bool is_over() const { return search_.is_over(); }
  /// The search is over and has found nothing: every token was forbidden.
  [[nodiscard]] bool has_failed() const { return search_.is_over() && search_.ranking().empty(); }

  /// The best beams. `reason` is that of beams that have not ended: kNotFinished when other results follow,
  /// unless the search is over.
  [[nodiscard]] Result make_result(FinishReason reason, bool has_prompt_in_output) const;

 private:
  static constexpr std::int32_t kIdle = -1;

  /// What was generated, without an end_id.
  struct Generated {
    std::span<const TokenId> tokens;
    std::span<const float> log_probs;
    std::span<const TokenLogProb> top_log_probs;
  };
  /// An ended beam's, kept.
  struct Kept {
    std::vector<TokenId> tokens;
    std::vector<float> log_probs;
    std::vector<TokenLogProb> top_log_probs;
  };

  [[nodiscard]] FinishReason end_of(const BeamCandidate& candidate);
  void keep(const BeamCandidate& candidate, const EndedBeam& ended);
  void assign_sequences();
  [[nodiscard]] ActiveSequence& sequence_of(std::int32_t beam) const {
    return *sequences_[static_cast<std::size_t>(sequence_of_beam_[static_cast<std::size_t>(beam)])];
  }
  /// Of the row that a sequence's next token is chosen from.
  [[nodiscard]] std::span<TokenLogProb> most_likely_after(const ActiveSequence& sequence);
  [[nodiscard]] Generated generated(const RankedBeam& beam) const;

  std::span<const std::unique_ptr<ActiveSequence>> sequences_;
  StopCriteria stop_;
  BeamSearch search_;
  std::size_t num_most_likely_;
  std::size_t num_returned_;
  bool wants_log_probs_;
  bool has_begun_ = false;     // all sequences run
  std::size_t num_taken_ = 0;  // rows since the last advance()
  std::vector<std::int32_t> sequence_of_beam_;
  std::vector<std::int32_t> beam_of_sequence_;  // or kIdle
  std::vector<ScoredToken> scored_;
  std::vector<TokenLogProb> most_likely_;  // num_most_likely_ a sequence
  std::vector<Kept> kept_;                 // by EndedBeam::place
  std::vector<BeamMove> moves_;
  // Of assign_sequences():
  std::vector<std::int32_t> next_sequence_of_beam_;
  std::vector<bool> goes_on_;
};

}  // namespace adaptrt
