#include "adaptrt/sample/beam_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace adaptrt {

BeamSearch::BeamSearch(const BeamSearchParams& params, std::int32_t num_end_tokens, std::int32_t max_tokens)
    : params_(params),
      max_tokens_(max_tokens),
      num_candidates_(static_cast<std::size_t>(std::max(2, 1 + num_end_tokens)) *
                      static_cast<std::size_t>(params.beam_width)) {
  const auto width = static_cast<std::size_t>(params.beam_width);
  beams_.reserve(width);
  beams_.emplace_back();
  candidates_.reserve(2 * num_candidates_);
  ended_.reserve(width + 1);
}

double BeamSearch::value_of(const BeamCandidate& candidate) const {
  return candidate.score + params_.diversity_rate * candidate.beam;
}

double BeamSearch::normalised(double score, std::int32_t length) const {
  // The minimum is above 0, so that a score of 0 stays 0.
  return score / std::max(std::pow(static_cast<double>(length), params_.length_penalty),
                          std::numeric_limits<double>::min());
}

void BeamSearch::add(std::int32_t beam, std::span<const ScoredToken> tokens) {
  const double score = beams_[static_cast<std::size_t>(beam)].score;
  for (const ScoredToken& next : tokens) {
    candidates_.push_back({.beam = beam, .next = next, .score = score + double{next.score}});
  }
  std::ranges::sort(candidates_, [this](const BeamCandidate& a, const BeamCandidate& b) {
    const double value_of_a = value_of(a);
    const double value_of_b = value_of(b);
    if (value_of_a != value_of_b) return value_of_a > value_of_b;
    return std::pair(a.beam, a.next.token) < std::pair(b.beam, b.next.token);
  });
  candidates_.resize(std::min(candidates_.size(), num_candidates_));
}

void BeamSearch::select(const EndOf& end_of, const Keep& keep) {
  ++num_steps_;
  const auto width = static_cast<std::size_t>(params_.beam_width);
  beams_.clear();
  for (std::size_t i = 0; i < candidates_.size(); ++i) {
    const FinishReason reason = end_of(candidates_[i]);
    if (reason == FinishReason::kNotFinished) {
      if (beams_.size() < width) beams_.push_back(candidates_[i]);
    } else if (i < width) {
      end_beam(candidates_[i], reason, keep);
    }
  }
  candidates_.clear();
  is_over_ = beams_.empty() || (ended_.size() == width && !may_improve());
}

void BeamSearch::end_beam(const BeamCandidate& candidate, FinishReason reason, const Keep& keep) {
  const auto width = static_cast<std::size_t>(params_.beam_width);
  EndedBeam beam{.place = static_cast<std::int32_t>(ended_.size()),
                 .score = candidate.score,
                 .normalised_score = normalised(candidate.score, num_steps_),
                 .reason = reason};
  if (ended_.size() == width) {
    if (beam.normalised_score <= ended_.back().normalised_score) return;
    beam.place = ended_.back().place;
    ended_.pop_back();
  }
  keep(candidate, beam);
  const auto place = std::ranges::upper_bound(ended_, beam.normalised_score, std::ranges::greater(),
                                              &EndedBeam::normalised_score);
  ended_.insert(place, beam);
}

bool BeamSearch::may_improve() const {
  if (params_.early_stopping == EarlyStopping::kWhenEnoughHaveEnded) return false;
  const bool is_patient = params_.early_stopping == EarlyStopping::kNever && params_.length_penalty > 0.0;
  const double best = std::ranges::max_element(beams_, {}, &BeamCandidate::score)->score;
  return normalised(best, is_patient ? max_tokens_ : num_steps_) > ended_.back().normalised_score;
}

std::vector<RankedBeam> BeamSearch::ranking() const {
  struct Entry {
    RankedBeam beam;
    double normalised_score;
  };
  std::vector<Entry> entries;
  entries.reserve(ended_.size() + beams_.size());
  for (const EndedBeam& ended : ended_) {
    entries.push_back({{true, ended.place, ended.score, ended.reason}, ended.normalised_score});
  }
  if (!is_over_) {
    for (std::size_t i = 0; i < beams_.size(); ++i) {
      const double score = beams_[i].score;
      entries.push_back({{false, static_cast<std::int32_t>(i), score, FinishReason::kNotFinished},
                         normalised(score, std::max(1, num_steps_))});
    }
    std::ranges::stable_sort(entries, std::ranges::greater(), &Entry::normalised_score);
  }
  std::vector<RankedBeam> ranked;
  for (const Entry& entry : entries) {
    if (std::cmp_less(ranked.size(), params_.beam_width)) ranked.push_back(entry.beam);
  }
  return ranked;
}

}  // namespace adaptrt
