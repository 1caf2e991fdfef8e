#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "adaptrt/sample/sampling_config.h"
#include "adaptrt/sample/stop.h"

namespace adaptrt {

/// A token that a beam may go on with. Sampler::score_tokens makes them.
struct ScoredToken {
  std::int32_t token = 0;
  /// Number that the token adds to the beam's score.
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
  /// 0 to beam_width - 1, another one for each: where the caller keeps its tokens.
  std::int32_t place = 0;
  /// The sum of its tokens' scores, that of the token which ended it included.
  double score = 0.0;
  /// score / length ** length_penalty, by which ended beams are ordered.
  double normalised_score = 0.0;
  FinishReason reason = FinishReason::kNotFinished;
};

/// A beam that a search returns, or would return if it ended now.
struct RankedBeam {
  bool has_ended = false;
  /// EndedBeam::place, or the number of the beam that goes on.
  std::int32_t place = 0;
  double score = 0.0;
  FinishReason reason = FinishReason::kNotFinished;
};

/// The search of one request: from the best tokens after each of its beams to the beams of the next step.
/// Knows beams by number (0 is the best) and no tokens but the newest.
///
/// The search works like transformers' generate(num_beams) for one prompt: it examines the best
/// num_candidates() of all candidates. Those that end and are among the best beam_width become ended beams,
/// of which the beam_width with the highest score / length ** length_penalty stay; the best beam_width of
/// those that do not end go on. As in TensorRT-LLM, diversity_rate * beam is added to a candidate's score
/// where candidates are compared, and nowhere else. Of equal candidates that of the lower beam is the better,
/// then that of the lower token; of equal ended beams the older: neither the batch nor the order of add()
/// changes anything.
class BeamSearch {
 public:
  /// `num_end_tokens`: tokens, or sequences of them, that end a beam before `max_tokens`.
  BeamSearch(const BeamSearchParams& params, std::int32_t num_end_tokens, std::int32_t max_tokens);

  /// max(2, 1 + num_end_tokens) * beam_width: so many of each beam's tokens are enough.
  [[nodiscard]] std::size_t num_candidates() const { return num_candidates_; }
  /// Beams that go on. One, the prompt, in the beginning; less than beam_width where no more tokens are
  /// allowed.
  [[nodiscard]] std::span<const BeamCandidate> beams() const { return beams_; }

  /// The best tokens after beams()[beam], at most num_candidates(), each once.
  void add(std::int32_t beam, std::span<const ScoredToken> tokens);

  /// Why a candidate is the last of its beam; kNotFinished when it is not.
  using EndOf = std::function<FinishReason(const BeamCandidate&)>;
  /// Where an ended beam is to be kept: in the place of one that stays no longer.
  using Keep = std::function<void(const BeamCandidate&, const EndedBeam&)>;
  /// When every beam has had its add(): makes beams() those of the next step, the candidates that they come
  /// from, best first.
  void select(const EndOf& end_of, const Keep& keep);

  /// No beam goes on, or those that do cannot be among the best: what early_stopping says of that.
  [[nodiscard]] bool is_over() const { return is_over_; }
  [[nodiscard]] std::int32_t num_steps() const { return num_steps_; }
  /// Best first, at most beam_width; of a search that is not over, those that go on are among them as if they
  /// ended now.
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
