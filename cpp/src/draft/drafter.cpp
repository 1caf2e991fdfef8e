#include "adaptrt/draft/drafter.h"

#include <algorithm>

namespace adaptrt {
namespace {

std::int32_t window_of(const DraftSources& sources) {
  return sources.lookahead ? sources.lookahead->max_window_size : 1;
}

}  // namespace

Drafter::Drafter(const DraftSources& sources, std::span<const std::int32_t> prompt, std::size_t max_length)
    : prompt_length_(prompt.size()),
      max_drafts_(std::min(max_length - prompt.size(),
                           std::max({sources.external.size(), static_cast<std::size_t>(window_of(sources)),
                                     static_cast<std::size_t>(sources.max_draft_len)}))),
      external_(sources.external),
      pace_(window_of(sources)),
      engine_pace_(std::max(sources.max_draft_len, 1)),
      has_engine_(sources.max_draft_len > 0) {
  if (!sources.lookahead) return;
  ngrams_.emplace(*sources.lookahead, max_length);
  ngrams_->extend(prompt);
}

void Drafter::draft(std::span<const std::int32_t> text, std::int32_t most,
                    std::vector<std::int32_t>& drafts) {
  drafts.clear();
  num_wanted_ = 0;
  pace_of_drafts_ = nullptr;
  if (!external_.empty()) draft_external(text, static_cast<std::size_t>(most), drafts);
  // Right after the prompt there are no drafts: an earlier occurrence of its last tokens seldom predicts the
  // answer, and a draft engine would have to compute the prompt first.
  if (!external_.empty() || text.size() == prompt_length_) return;
  if (ngrams_) draft_from_ngrams(text, most, drafts);
  if (has_engine_ && drafts.empty()) num_wanted_ = std::min(engine_pace_.next(), most);
}

void Drafter::draft_from_ngrams(std::span<const std::int32_t> text, std::int32_t most,
                                std::vector<std::int32_t>& drafts) {
  ngrams_->extend(text);
  const std::int32_t count = std::min(pace_.next(), most);
  if (count == 0) return;
  // After misses, only occurrences with longer matches count.
  ngrams_->find(text, static_cast<std::size_t>(pace_.num_misses()), static_cast<std::size_t>(count), drafts);
  pace_of_drafts_ = &pace_;
}

void Drafter::take_drafts_of_engine() {
  num_wanted_ = 0;
  pace_of_drafts_ = &engine_pace_;
}

void Drafter::draft_external(std::span<const std::int32_t> text, std::size_t most,
                             std::vector<std::int32_t>& drafts) {
  const auto generated = text.subspan(prompt_length_);
  while (num_right_external_ < std::min(generated.size(), external_.size()) &&
         generated[num_right_external_] == external_[num_right_external_]) {
    ++num_right_external_;
  }
  if (num_right_external_ < generated.size() || num_right_external_ == external_.size()) {
    external_.clear();
    return;
  }
  const auto left = std::span(external_).subspan(num_right_external_);
  drafts.assign(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(std::min(most, left.size())));
}

void Drafter::record(std::int32_t num_computed, std::int32_t num_right) {
  if (pace_of_drafts_ != nullptr && num_computed > 0) pace_of_drafts_->record(num_computed, num_right);
}

}  // namespace adaptrt
