#include "adaptrt/draft/ngram_index.h"

#include <algorithm>
#include <bit>

namespace adaptrt {

NgramIndex::NgramIndex(const LookaheadDecodingConfig& config, std::size_t max_length)
    : key_length_(std::min(kShortestMatch, static_cast<std::size_t>(config.max_ngram_size) - 1)),
      longest_match_(static_cast<std::size_t>(config.max_ngram_size) - 1),
      num_places_(config.max_verification_set_size),
      newest_(std::bit_ceil(max_length + 1), kNowhere),
      before_(max_length + 1, kNowhere) {}

void NgramIndex::extend(std::span<const std::int32_t> text) {
  for (std::size_t end = std::max(num_entered_ + 1, key_length_); end <= text.size(); ++end) {
    std::int32_t& newest = newest_[bucket_of(text, end)];
    before_[end] = newest;
    newest = static_cast<std::int32_t>(end);
  }
  num_entered_ = text.size();
}

void NgramIndex::find(std::span<const std::int32_t> text, std::size_t num_more, std::size_t count,
                      std::vector<std::int32_t>& drafts) const {
  if (text.size() < key_length_) return;
  std::size_t best = 0;
  std::size_t longest = std::min(key_length_ + num_more, longest_match_) - 1;
  std::int32_t num_places = 0;
  std::int32_t num_others = 0;
  for (std::int32_t place = before_[text.size()];
       place != kNowhere && longest < longest_match_ && num_places < num_places_ && num_others < kMostOthers;
       place = before_[static_cast<std::size_t>(place)]) {
    const auto end = static_cast<std::size_t>(place);
    const std::size_t length = match_at(text, end);
    ++(length < key_length_ ? num_others : num_places);
    if (length > longest) {
      best = end;
      longest = length;
    }
  }
  if (best == 0) return;
  const std::size_t period = text.size() - best;
  for (std::size_t i = 0; i < count; ++i) drafts.push_back(text[best + i % period]);
}

std::size_t NgramIndex::bucket_of(std::span<const std::int32_t> text, std::size_t end) const {
  std::uint64_t hash = 0;
  for (const std::int32_t token : text.subspan(end - key_length_, key_length_)) {
    hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 32;
  }
  return static_cast<std::size_t>(hash) & (newest_.size() - 1);
}

std::size_t NgramIndex::match_at(std::span<const std::int32_t> text, std::size_t end) const {
  const std::size_t most = std::min(longest_match_, end);
  std::size_t length = 0;
  while (length < most && text[end - 1 - length] == text[text.size() - 1 - length]) ++length;
  return length;
}

}  // namespace adaptrt
