#include "token_step.h"

#include "adaptrt/core/error.h"

namespace adaptrt {

void TokenStep::begin(std::span<const LogitRow> rows) {
  rows_ = rows;
  outcomes_.clear();
  post_processing_.begin();
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
  } catch (const StepError& error) {
    outcomes_.push_back({&request, FinishReason::kNotFinished, error.what()});
    return;
  }
  if (!row.is_sampled) return;
  if (request.post_processor().processor) {
    post_processing_.add(request, logits);
  } else {
    choose(request, logits, nullptr);
  }
}

void TokenStep::finish() {
  post_processing_.run();
  for (std::size_t i = 0; i < post_processing_.size(); ++i) {
    const PostProcessedRow& row = post_processing_.row(i);
    ActiveRequest& request = post_processing_.request(i);
    if (row.error.empty()) {
      choose(request, post_processing_.logits(i), row.logits->data());
    } else {
      outcomes_.push_back({&request, FinishReason::kNotFinished, row.error});
    }
  }
}

void TokenStep::choose(ActiveRequest& request, const float* logits, const float* changed_logits) {
  try {
    outcomes_.push_back({&request, sample(request, logits, changed_logits), {}});
  } catch (const StepError& error) {
    outcomes_.push_back({&request, FinishReason::kNotFinished, error.what()});
  }
}

FinishReason TokenStep::sample(ActiveRequest& request, const float* logits, const float* changed_logits) {
  const std::span most_likely = std::span(most_likely_).first(request.num_most_likely());
  const SampledToken sampled =
      sampler_.sample(request.sampler(), logits, request.tokens, request.wants_log_probs(), most_likely,
                      {.allowed = request.allowed_tokens(), .logits = changed_logits});
  return request.append(sampled, logits, most_likely);
}

}  // namespace adaptrt
