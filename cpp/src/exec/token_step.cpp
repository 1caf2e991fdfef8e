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
  ActiveSequence& sequence = *row.sequence;
  ActiveRequest& request = sequence.request();
  // A sequence's rows follow each other, the sampled one last: after an outcome the rest are of no use.
  if (!outcomes_.empty() && outcomes_.back().sequence == &sequence) return;
  try {
    if (row.is_prompt) request.add_prompt_row(logits);
    if (!row.is_sampled) return;
    const bool ends_prompt = sequence.index == 0 && sequence.num_generated() == 0;
    sample(sequence, logits);
    if (!ends_prompt) return;
    for (const auto& other : request.sequences().subspan(1)) sample(*other, logits);
  } catch (const StepError& error) {
    outcomes_.push_back({&sequence, FinishReason::kNotFinished, error.what()});
  }
}

void TokenStep::sample(ActiveSequence& sequence, const float* logits) {
  const ActiveRequest& request = sequence.request();
  const std::span most_likely = std::span(most_likely_).first(request.num_most_likely());
  const SampledToken sampled =
      sampler_.sample(sequence.sampler(), logits, sequence.tokens, request.wants_log_probs(), most_likely);
  outcomes_.push_back({&sequence, sequence.append(request.stop(), sampled, logits, most_likely), {}});
}

}  // namespace adaptrt
