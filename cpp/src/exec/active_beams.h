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

/// The beam search of a request: maps beams to sequences and keeps the beams that have ended.
///
/// All sequences of the request run from its first token until the search is over. A beam with successors
/// stays in its sequence with the first of them. The other successors move to sequences whose beams have
/// none. Near the token limit fewer beams than sequences may continue. The remaining sequences are idle: they
/// follow the best beam and are computed, but give no candidates.
class ActiveBeams {
 public:
  /// `request` was validated. `sequences` has all beam_width sequences, and outlives this object.
  ActiveBeams(const Request& request, std::span<const std::unique_ptr<ActiveSequence>> sequences,
              const StopCriteria& stop, std::size_t num_most_likely);

  /// Takes the row of logits that follows a sequence. Returns true if it was the last one; then call
  /// advance(). Throws StepError.
  [[nodiscard]] bool take(ActiveSequence& sequence, const float* logits, Sampler& sampler);
  /// Gives the sequences their next tokens, unless the search is over. Call it after the commit of the step
  /// that computed the last row.
  void advance();
  /// Moves from the last advance(): for sequences whose beams have no successor, and for sequences that begin
  /// now.
  [[nodiscard]] std::span<const BeamMove> moves() const { return moves_; }
  [[nodiscard]] bool is_over() const { return search_.is_over(); }
  /// True if the search is over without a result: every token was forbidden.
  [[nodiscard]] bool has_failed() const { return search_.is_over() && search_.ranking().empty(); }

  /// Returns the best beams. `reason` applies to beams that have not ended; it is kNotFinished if other
  /// results follow, unless the search is over.
  [[nodiscard]] Result make_result(FinishReason reason, bool has_prompt_in_output) const;

 private:
  static constexpr std::int32_t kIdle = -1;

  /// Generated tokens of a beam, without an end_id.
  struct Generated {
    std::span<const TokenId> tokens;
    std::span<const float> log_probs;
    std::span<const TokenLogProb> top_log_probs;
  };
  /// Stored tokens of an ended beam.
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
  /// Returns the most likely tokens of the row that a sequence's next token is chosen from.
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
  // Scratch of assign_sequences():
  std::vector<std::int32_t> next_sequence_of_beam_;
  std::vector<bool> goes_on_;
};

}  // namespace adaptrt
