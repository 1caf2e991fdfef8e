#include "token_step.h"

#include "adaptrt/core/error.h"

namespace adaptrt {

void TokenStep::begin(std::span<const LogitRow> rows) {
  rows_ = rows;
  outcomes_.clear();
}

void TokenStep::take(std::int64_t first_row, std::int64_t num_rows, const float* logits) {
  for (const auto& row :
       rows_.subspan(static_cast<std::size_t>(first_row), static_cast<std::size_t>(num_rows))) {
    if (row.is_context) row.request->add_context_logits(logits);
    if (row.is_sampled) outcomes_.push_back(sample(*row.request, logits));
    logits += vocab_size_;
  }
}

TokenOutcome TokenStep::sample(ActiveRequest& request, const float* logits) {
  try {
    const SampledToken sampled =
        sampler_.sample(request.sampler(), logits, request.tokens, request.wants_log_probs());
    return {&request, request.append(sampled, logits), {}};
  } catch (const StepError& error) {
    return {&request, FinishReason::kNotFinished, error.what()};
  }
}

}  // namespace adaptrt
