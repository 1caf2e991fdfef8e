#include "adaptrt/sample/stop.h"

#include <algorithm>
#include <utility>

namespace adaptrt {

FinishReason StopCriteria::check(std::span<const std::int32_t> generated) const {
  if (generated.empty()) return FinishReason::kNotFinished;
  if (end_id && generated.back() == *end_id) return FinishReason::kEndId;
  for (const auto& word : stop_words) {
    if (word.size() <= generated.size() && std::ranges::equal(generated.last(word.size()), word)) {
      return FinishReason::kStopWords;
    }
  }
  return std::cmp_greater_equal(generated.size(), max_tokens) ? FinishReason::kLength
                                                              : FinishReason::kNotFinished;
}

}  // namespace adaptrt
