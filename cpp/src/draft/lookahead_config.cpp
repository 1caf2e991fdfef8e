#include "adaptrt/draft/lookahead_config.h"

#include <string>

namespace adaptrt {

Problems LookaheadDecodingConfig::validate() const {
  Problems problems;
  const auto require_at_least = [&](const char* name, std::int32_t value, std::int32_t least) {
    if (value >= least) return;
    problems.add(std::string(name) + " is " + std::to_string(value) + "; accepted: " + std::to_string(least) +
                 " or more");
  };
  require_at_least("max_window_size", max_window_size, 1);
  require_at_least("max_ngram_size", max_ngram_size, 1);
  require_at_least("max_verification_set_size", max_verification_set_size, 0);
  if (!problems.empty() || max_ngram_size > 1) return problems;
  const auto require_for_no_ngrams = [&](const char* name, std::int32_t value, std::int32_t accepted) {
    if (value == accepted) return;
    problems.add(std::string(name) + " is " + std::to_string(value) + " and max_ngram_size 1; accepted: " +
                 std::to_string(accepted) + ", or max_ngram_size of 2 or more");
  };
  require_for_no_ngrams("max_window_size", max_window_size, 1);
  require_for_no_ngrams("max_verification_set_size", max_verification_set_size, 0);
  return problems;
}

}  // namespace adaptrt
