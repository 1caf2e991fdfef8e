#include <algorithm>
#include <limits>

#include "adaptrt/core/error.h"
#include "adaptrt/sample/beam_search.h"
#include "adaptrt/sample/sampler.h"
#include "row_math.h"

namespace adaptrt {

std::size_t Sampler::score_tokens(SamplerState& state, const float* logits,
                                  std::span<const std::int32_t> tokens, std::span<ScoredToken> best,
                                  std::span<TokenLogProb> most_likely) {
  const std::span raw(logits, row_size(state));
  const std::span values = std::span(values_).first(raw.size());
  const float max = usable_range_of(raw).max;
  const LogSoftmax softmax(raw, max);
  if (const double temperature = state.params().temperature; temperature == 1.0) {
    softmax.log_probs(values);
  } else {
    // No difference is above 0, so no temperature makes one infinite.
    for (std::size_t i = 0; i < raw.size(); ++i) {
      weights_[i] = static_cast<float>((double{raw[i]} - double{max}) / temperature);
    }
    LogSoftmax(std::span(weights_).first(raw.size()), 0.0F).log_probs(values);
  }
  const std::span scores(apply_constraints(state, values.data(), tokens, {}), raw.size());
  if (range_of(scores).has_nan_or_infinity) {
    throw StepError("bias or penalties have made log probs NaN or infinity");
  }
  highest_.resize(std::min(best.size(), raw.size()));
  find_highest(scores, highest_);
  std::size_t count = 0;
  for (const TokenLogProb& entry : highest_) {
    if (entry.log_prob == -std::numeric_limits<float>::infinity()) break;
    best[count++] = {
        .token = entry.token_id, .score = entry.log_prob, .log_prob = softmax.log_prob(entry.token_id)};
  }
  softmax.find_most_likely(most_likely);
  return count;
}

}  // namespace adaptrt
