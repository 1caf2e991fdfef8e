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
    take_row(row, logits);
    logits += vocab_size_;
  }
}

void TokenStep::take_row(const LogitRow& row, const float* logits) {
  ActiveRequest& request = *row.request;
  // A request's rows follow each other, the sampled one last: after an outcome the rest are of no use.
  if (!outcomes_.empty() && outcomes_.back().request == &request) return;
  try {
    if (row.is_prompt) request.add_prompt_row(logits);
    if (row.is_sampled) outcomes_.push_back({&request, sample(request, logits), {}});
  } catch (const StepError& error) {
    outcomes_.push_back({&request, FinishReason::kNotFinished, error.what()});
  }
}

FinishReason TokenStep::sample(ActiveRequest& request, const float* logits) {
  const std::span most_likely = std::span(most_likely_).first(request.num_most_likely());
  const SampledToken sampled =
      sampler_.sample(request.sampler(), logits, request.tokens, request.wants_log_probs(), most_likely,
                      request.allowed_tokens());
  return request.append(sampled, logits, most_likely);
}

}  // namespace adaptrt
