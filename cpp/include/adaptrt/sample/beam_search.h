#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "adaptrt/sample/sampling_config.h"
#include "adaptrt/sample/stop.h"

namespace adaptrt {

/// A possible next token of a beam; see Sampler::score_tokens.
struct ScoredToken {
  std::int32_t token = 0;
  /// Amount that the token adds to the beam's score.
  float score = 0.0F;
  /// Log probability from LogSoftmax.
  float log_prob = 0.0F;

  bool operator==(const ScoredToken&) const = default;
};

/// A beam and a token after it.
struct BeamCandidate {
  std::int32_t beam = 0;
  ScoredToken next;
  /// Score of the beam with the token: the sum of its tokens' scores.
  double score = 0.0;

  bool operator==(const BeamCandidate&) const = default;
};

/// A beam that has ended.
struct EndedBeam {
  /// Index from 0 to beam_width - 1, unique among the ended beams; the caller stores the beam's tokens under
  /// it.
  std::int32_t place = 0;
  /// Sum of its tokens' scores, including the token that ended it.
  double score = 0.0;
  /// score / length ** length_penalty, by which ended beams are ordered.
  double normalised_score = 0.0;
  FinishReason reason = FinishReason::kNotFinished;
};

/// A beam in the result of a search; also for a search that has not ended.
struct RankedBeam {
  bool has_ended = false;
  /// EndedBeam::place, or the index of an active beam.
  std::int32_t place = 0;
  double score = 0.0;
  FinishReason reason = FinishReason::kNotFinished;
};

/// The beam search of one request: selects the beams of the next step from the best tokens after each beam.
/// Knows beams by index (0 is the best) and only their newest tokens.
///
/// The search works like transformers' generate(num_beams) for one prompt. It examines the best
/// num_candidates() of all candidates. Those that end and are among the best beam_width become ended beams;
/// the beam_width of these with the highest score / length ** length_penalty are kept. The best beam_width of
/// the other candidates continue. As in TensorRT-LLM, diversity_rate * beam is added to a candidate's score,
/// only when candidates are compared. Among equal candidates the lower beam is better, then the lower token;
/// among equal ended beams the older one. So neither the batch nor the order of add() calls changes the
/// result.
class BeamSearch {
 public:
  /// `num_end_tokens`: number of tokens, or token sequences, that can end a beam before `max_tokens`.
  BeamSearch(const BeamSearchParams& params, std::int32_t num_end_tokens, std::int32_t max_tokens);

  /// max(2, 1 + num_end_tokens) * beam_width: number of tokens that each beam must provide.
  [[nodiscard]] std::size_t num_candidates() const { return num_candidates_; }
  /// The active beams. At first one, the prompt; fewer than beam_width at the token limit.
  [[nodiscard]] std::span<const BeamCandidate> beams() const { return beams_; }

  /// Adds the best tokens after beams()[beam], at most num_candidates(), without duplicates.
  void add(std::int32_t beam, std::span<const ScoredToken> tokens);

  /// Returns why a candidate ends its beam; kNotFinished if it does not.
  using EndOf = std::function<FinishReason(const BeamCandidate&)>;
  /// Stores an ended beam's tokens; its place may have belonged to a beam that was dropped.
  using Keep = std::function<void(const BeamCandidate&, const EndedBeam&)>;
  /// Selects the beams of the next step; call it after add() for every beam. beams() then has the chosen
  /// candidates, best first.
  void select(const EndOf& end_of, const Keep& keep);

  /// True if no beam is active, or if early_stopping says that the active ones cannot be among the best.
  [[nodiscard]] bool is_over() const { return is_over_; }
  [[nodiscard]] std::int32_t num_steps() const { return num_steps_; }
  /// Returns at most beam_width beams, best first. If the search is not over, active beams are ranked as if
  /// they ended now.
  [[nodiscard]] std::vector<RankedBeam> ranking() const;

 private:
  [[nodiscard]] double value_of(const BeamCandidate& candidate) const;
  [[nodiscard]] double normalised(double score, std::int32_t length) const;
  void end_beam(const BeamCandidate& candidate, FinishReason reason, const Keep& keep);
  [[nodiscard]] bool may_improve() const;

  BeamSearchParams params_;
  std::int32_t max_tokens_;
  std::size_t num_candidates_;
  std::vector<BeamCandidate> beams_;
  std::vector<BeamCandidate> candidates_;  // the best of what was added, best first
  std::vector<EndedBeam> ended_;           // best first
  std::int32_t num_steps_ = 0;
  bool is_over_ = false;
};

}  // namespace adaptrt
