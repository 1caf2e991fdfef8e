#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/draft/lookahead_config.h"

namespace adaptrt {

/// Index of the n-grams in a growing text. Adding a token takes constant time and allocates nothing.
class NgramIndex {
 public:
  /// `config` must be valid and allow drafts. `max_length`: maximum number of tokens in the text; memory for
  /// them is allocated here.
  NgramIndex(const LookaheadDecodingConfig& config, std::size_t max_length);

  /// Adds the tokens of `text` that are new since the last call; `text` must begin with the previous text.
  void extend(std::span<const std::int32_t> text);
  /// Appends to `drafts` the `count` tokens that followed an earlier occurrence of the newest tokens of
  /// `text`, which is the text that was entered last. Appends nothing if there is no such occurrence. Only
  /// the max_verification_set_size newest occurrences are compared. The one with the most matching tokens
  /// wins, and the newest of equal ones. At most max_ngram_size - 1 tokens are compared. At least
  /// kShortestMatch tokens must match (1 if max_ngram_size is 2), plus `num_more` as far as so many are
  /// compared. An occurrence with fewer than `count` tokens after it counts as the beginning of a loop, which
  /// is repeated.
  void find(std::span<const std::int32_t> text, std::size_t num_more, std::size_t count,
            std::vector<std::int32_t>& drafts) const;

 private:
  /// Single tokens occur too often to predict the next one.
  static constexpr std::size_t kShortestMatch = 2;
  static constexpr std::int32_t kNowhere = -1;
  /// Maximum number of other keys of a bucket that are skipped, so that no text makes the search long.
  static constexpr std::int32_t kMostOthers = 64;

  /// Returns the bucket of the key_length_ tokens that end before `end`.
  [[nodiscard]] std::size_t bucket_of(std::span<const std::int32_t> text, std::size_t end) const;
  /// Returns the number of tokens before `end` that equal those at the end of the text, at most
  /// longest_match_.
  [[nodiscard]] std::size_t match_at(std::span<const std::int32_t> text, std::size_t end) const;

  std::size_t key_length_;
  std::size_t longest_match_;
  std::int32_t num_places_;
  std::size_t num_entered_ = 0;
  /// newest_ maps the hash of a key to the end of its newest occurrence. before_ maps the end of an
  /// occurrence to the previous one in the same bucket.
  std::vector<std::int32_t> newest_;
  std::vector<std::int32_t> before_;
};

}  // namespace adaptrt
