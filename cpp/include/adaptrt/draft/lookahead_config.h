#pragma once

#include <cstdint>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// TensorRT-LLM's LookaheadDecodingConfig: drafts copied from the sequence's own text, after an earlier
/// occurrence of its newest tokens. Legal values are TensorRT-LLM's; for their meaning here see NgramIndex.
struct LookaheadDecodingConfig {
  /// Maximum number of drafts of one step, at least 1.
  std::int32_t max_window_size = 1;
  /// Length of the longest n-gram looked up, whose last token is the first draft; at least 1. With 1 there
  /// are no drafts.
  std::int32_t max_ngram_size = 1;
  /// Maximum number of occurrences in the text that are compared, newest first; 0 for none.
  std::int32_t max_verification_set_size = 0;

  /// True if the configuration allows any drafts.
  [[nodiscard]] bool drafts() const { return max_ngram_size > 1 && max_verification_set_size > 0; }
  [[nodiscard]] Problems validate() const;
  bool operator==(const LookaheadDecodingConfig&) const = default;
};

}  // namespace adaptrt
