#pragma once

#include <cstdint>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// TensorRT-LLM's LookaheadDecodingConfig: drafts of a sequence's next tokens from its own text, where its
/// newest tokens have stood before. Legal values are TensorRT-LLM's; what they mean here is NgramIndex's.
struct LookaheadDecodingConfig {
  /// Drafts of one step at most; at least 1.
  std::int32_t max_window_size = 1;
  /// The longest n-gram that is looked for, its last token the first draft; at least 1, and 1: none is.
  std::int32_t max_ngram_size = 1;
  /// Places in the text that are compared at most, the newest first; 0: none.
  std::int32_t max_verification_set_size = 0;

  /// True if the configuration allows any drafts.
  [[nodiscard]] bool drafts() const { return max_ngram_size > 1 && max_verification_set_size > 0; }
  [[nodiscard]] Problems validate() const;
  bool operator==(const LookaheadDecodingConfig&) const = default;
};

}  // namespace adaptrt
