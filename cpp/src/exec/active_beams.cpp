#include "active_beams.h"

#include <algorithm>
#include <utility>

namespace adaptrt {
namespace {

std::int32_t num_end_tokens(const StopCriteria& stop) {
  return static_cast<std::int32_t>(stop.stop_words.size()) + (stop.end_id ? 1 : 0);
}

}  // namespace

ActiveBeams::ActiveBeams(const Request& request, std::span<const std::unique_ptr<ActiveSequence>> sequences,
                         const StopCriteria& stop, std::size_t num_most_likely)
    : sequences_(sequences),
      stop_(stop),
      search_(resolve_beams(request.sampling_config), num_end_tokens(stop), request.max_tokens),
      num_most_likely_(num_most_likely),
      num_returned_(static_cast<std::size_t>(request.num_returned_beams())),
      wants_log_probs_(request.output_config.return_log_probs),
      sequence_of_beam_(sequences.size(), 0),
      beam_of_sequence_(sequences.size(), kIdle),
      scored_(search_.num_candidates()),
      most_likely_(sequences.size() * num_most_likely),
      kept_(sequences.size()),
      next_sequence_of_beam_(sequences.size()),
      goes_on_(sequences.size()) {
  beam_of_sequence_.front() = 0;
  moves_.reserve(sequences.size());
  const auto max_tokens = static_cast<std::size_t>(request.max_tokens);
  for (Kept& kept : kept_) {
    kept.tokens.reserve(max_tokens);
    if (wants_log_probs_) kept.log_probs.reserve(max_tokens);
    kept.top_log_probs.reserve(max_tokens * num_most_likely);
  }
}

std::span<TokenLogProb> ActiveBeams::most_likely_after(const ActiveSequence& sequence) {
  return std::span(most_likely_)
      .subspan(static_cast<std::size_t>(sequence.index) * num_most_likely_, num_most_likely_);
}

bool ActiveBeams::take(ActiveSequence& sequence, const float* logits, Sampler& sampler) {
  const std::int32_t beam = beam_of_sequence_[static_cast<std::size_t>(sequence.index)];
  if (beam != kIdle) {
    const std::size_t count = sampler.score_tokens(sequence.sampler(), logits, sequence.tokens, scored_,
                                                   most_likely_after(sequence));
    search_.add(beam, std::span(scored_).first(count));
  }
  return ++num_taken_ == (has_begun_ ? sequences_.size() : 1);
}

void ActiveBeams::advance() {
  num_taken_ = 0;
  moves_.clear();
  search_.select([this](const BeamCandidate& candidate) { return end_of(candidate); },
                 [this](const BeamCandidate& candidate, const EndedBeam& ended) { keep(candidate, ended); });
  if (!search_.is_over()) assign_sequences();
}

FinishReason ActiveBeams::end_of(const BeamCandidate& candidate) {
  ActiveSequence& sequence = sequence_of(candidate.beam);
  sequence.tokens.push_back(candidate.next.token);
  const FinishReason reason =
      stop_.check(std::span(sequence.tokens).subspan(static_cast<std::size_t>(sequence.prompt_length)));
  sequence.tokens.pop_back();
  return reason;
}

void ActiveBeams::keep(const BeamCandidate& candidate, const EndedBeam& ended) {
  const ActiveSequence& sequence = sequence_of(candidate.beam);
  Kept& kept = kept_[static_cast<std::size_t>(ended.place)];
  kept.tokens.assign(sequence.tokens.begin() + sequence.prompt_length, sequence.tokens.end());
  kept.log_probs.assign(sequence.log_probs().begin(), sequence.log_probs().end());
  kept.top_log_probs.assign(sequence.top_log_probs().begin(), sequence.top_log_probs().end());
  if (ended.reason == FinishReason::kEndId) return;
  kept.tokens.push_back(candidate.next.token);
  if (wants_log_probs_) kept.log_probs.push_back(candidate.next.log_prob);
  const auto most_likely = most_likely_after(sequence);
  kept.top_log_probs.insert(kept.top_log_probs.end(), most_likely.begin(), most_likely.end());
}

void ActiveBeams::assign_sequences() {
  const auto beams = search_.beams();
  const auto num_sequences = static_cast<std::int32_t>(sequences_.size());
  std::fill(goes_on_.begin(), goes_on_.end(), false);
  for (std::size_t i = 0; i < beams.size(); ++i) {
    const std::int32_t parent = sequence_of(beams[i].beam).index;
    const bool stays = !goes_on_[static_cast<std::size_t>(parent)];
    goes_on_[static_cast<std::size_t>(parent)] = true;
    next_sequence_of_beam_[i] = stays ? parent : kIdle;
  }
  std::int32_t next = 0;
  const auto next_given_up = [&] {
    while (next < num_sequences && goes_on_[static_cast<std::size_t>(next)]) ++next;
    return next < num_sequences ? next++ : kIdle;
  };
  // Tokens are appended after all sequences have followed their parents.
  const auto follow = [&](std::int32_t index, const ActiveSequence& parent) {
    ActiveSequence& sequence = *sequences_[static_cast<std::size_t>(index)];
    sequence.follow(parent);
    moves_.push_back({.from = &parent, .to = &sequence});
  };
  for (std::size_t i = 0; i < beams.size(); ++i) {
    if (next_sequence_of_beam_[i] != kIdle) continue;
    next_sequence_of_beam_[i] = next_given_up();
    follow(next_sequence_of_beam_[i], sequence_of(beams[i].beam));
  }
  std::ranges::fill(beam_of_sequence_, kIdle);
  for (std::int32_t idle = next_given_up(); idle != kIdle; idle = next_given_up()) {
    follow(idle, sequence_of(beams.front().beam));
    sequences_[static_cast<std::size_t>(idle)]->go_on_with(
        beams.front().next, most_likely_after(sequence_of(beams.front().beam)));
  }
  for (std::size_t i = 0; i < beams.size(); ++i) {
    const auto index = static_cast<std::size_t>(next_sequence_of_beam_[i]);
    sequences_[index]->go_on_with(beams[i].next, most_likely_after(sequence_of(beams[i].beam)));
    beam_of_sequence_[index] = static_cast<std::int32_t>(i);
  }
  std::ranges::copy_n(next_sequence_of_beam_.begin(), static_cast<std::ptrdiff_t>(beams.size()),
                      sequence_of_beam_.begin());
  has_begun_ = true;
}

ActiveBeams::Generated ActiveBeams::generated(const RankedBeam& beam) const {
  if (beam.has_ended) {
    const Kept& kept = kept_[static_cast<std::size_t>(beam.place)];
    return {kept.tokens, kept.log_probs, kept.top_log_probs};
  }
  const ActiveSequence& sequence = sequence_of(beam.place);
  return {std::span(sequence.tokens).subspan(static_cast<std::size_t>(sequence.prompt_length)),
          sequence.log_probs(), sequence.top_log_probs()};
}

Result ActiveBeams::make_result(FinishReason reason, bool has_prompt_in_output) const {
  Result result;
  result.is_sequence_final = is_over() || reason != FinishReason::kNotFinished;
  result.decoding_iter = search_.num_steps();
  if (wants_log_probs_) {
    result.cum_log_probs.emplace();
    result.log_probs.emplace();
  }
  if (num_most_likely_ > 0) result.top_log_probs.emplace();
  const ActiveSequence& first = *sequences_.front();
  for (const RankedBeam& beam : search_.ranking()) {
    if (result.output_token_ids.size() == num_returned_) break;
    const Generated of_beam = generated(beam);
    auto& tokens = result.output_token_ids.emplace_back();
    if (has_prompt_in_output) tokens.assign(first.tokens.begin(), first.tokens.begin() + first.prompt_length);
    tokens.insert(tokens.end(), of_beam.tokens.begin(), of_beam.tokens.end());
    result.finish_reasons.push_back(beam.has_ended ? beam.reason : reason);
    if (wants_log_probs_) {
      result.cum_log_probs->push_back(static_cast<float>(beam.score));
      result.log_probs->emplace_back(of_beam.log_probs.begin(), of_beam.log_probs.end());
    }
    if (num_most_likely_ > 0) {
      result.top_log_probs->push_back(in_rows_of(num_most_likely_, of_beam.top_log_probs));
    }
  }
  return result;
}

}  // namespace adaptrt
