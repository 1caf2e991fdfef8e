#include "token_step.h"

#include "adaptrt/core/error.h"

namespace adaptrt {

void TokenStep::begin(const StepBuilder& step) {
  rows_ = step.logit_rows();
  hidden_rows_ = step.hidden_rows();
  outcomes_.clear();
  searches_.clear();
  post_processing_.begin();
}

void TokenStep::take(std::int64_t first_row, std::int64_t num_rows, const float* logits) {
  for (const auto& row :
       rows_.subspan(static_cast<std::size_t>(first_row), static_cast<std::size_t>(num_rows))) {
    take_row(row, {.logits = logits});
    logits += logits_width_;
  }
}

void TokenStep::take_found(const StepBuilder& step) {
  const auto best_tokens = step.best_tokens();
  for (std::size_t i = 0; i < best_tokens.size(); ++i) {
    take_row(step.best_token_rows()[i], {.best_token = best_tokens[i]});
  }
  const auto highest_rows = step.highest_rows();
  for (std::size_t i = 0; i < highest_rows.size(); ++i) {
    take_row(highest_rows[i], {.highest = step.highest(i)});
  }
}

void TokenStep::take_hidden(std::int64_t first_row, std::int64_t num_rows, const float* hidden) {
  for (const auto& row :
       hidden_rows_.subspan(static_cast<std::size_t>(first_row), static_cast<std::size_t>(num_rows))) {
    const std::span state(hidden, static_cast<std::size_t>(hidden_size_));
    hidden += hidden_size_;
    ActiveSequence& sequence = *row.sequence;
    // After a failure, the sequence's other rows are ignored.
    if (!outcomes_.empty() && outcomes_.back().sequence == &sequence) continue;
    Pooler& pooler = *sequence.request().pooler();
    try {
      pooler.add(state);
      if (pooler.is_complete()) outcomes_.push_back({&sequence, FinishReason::kLength, {}});
    } catch (const StepError& error) {
      outcomes_.push_back({&sequence, FinishReason::kNotFinished, error.what()});
    }
  }
}

void TokenStep::take_row(const LogitRow& row, const ComputedRow& computed) {
  if (row.sequence == nullptr) return;
  if (row.draft) {
    take_draft_row(row, computed);
    return;
  }
  ActiveSequence& sequence = *row.sequence;
  // A sequence's rows are contiguous, with the sampled one last; after an outcome the rest are ignored.
  if (!outcomes_.empty() && outcomes_.back().sequence == &sequence) return;
  try {
    if (row.is_prompt) sequence.request().add_prompt_row(computed.logits);
  } catch (const StepError& error) {
    outcomes_.push_back({&sequence, FinishReason::kNotFinished, error.what()});
    return;
  }
  if (!row.is_sampled) return;
  if (sequence.is_beam) {
    take_row_of_beam(sequence, computed.logits);
    return;
  }
  const bool ends_prompt = sequence.index == 0 && sequence.num_generated() == 0;
  take_sampled_row(sequence, computed);
  if (!ends_prompt) return;
  for (const auto& other : sequence.request().sequences().subspan(1)) take_sampled_row(*other, computed);
}

void TokenStep::take_draft_row(const LogitRow& row, const ComputedRow& computed) {
  ActiveSequence& sequence = *row.sequence;
  if (sequence.is_complete() || sequence.num_tokens() != row.draft->position + 1 ||
      sequence.tokens.back() != row.draft->token) {
    return;
  }
  try {
    outcomes_.back().reason = sample(sequence, computed);
  } catch (const StepError&) {
    // Deliver the earlier tokens first; the next step finds the same error in the same row.
  }
}

void TokenStep::take_row_of_beam(ActiveSequence& sequence, const float* logits) {
  ActiveRequest& request = sequence.request();
  try {
    if (request.beams()->take(sequence, logits, sampler_)) searches_.push_back(&request);
  } catch (const StepError& error) {
    outcomes_.push_back({&sequence, FinishReason::kNotFinished, error.what()});
  }
}

void TokenStep::take_sampled_row(ActiveSequence& sequence, const ComputedRow& row) {
  if (sequence.request().post_processor().processor) {
    post_processing_.add(sequence, row.logits);
  } else {
    choose(sequence, row);
  }
}

void TokenStep::finish() {
  post_processing_.run();
  for (std::size_t i = 0; i < post_processing_.size(); ++i) {
    const PostProcessedRow& row = post_processing_.row(i);
    ActiveSequence& sequence = post_processing_.sequence(i);
    if (row.error.empty()) {
      choose(sequence, {.logits = post_processing_.logits(i), .changed_logits = row.logits->data()});
    } else {
      outcomes_.push_back({&sequence, FinishReason::kNotFinished, row.error});
    }
  }
}

void TokenStep::choose(ActiveSequence& sequence, const ComputedRow& row) {
  try {
    outcomes_.push_back({&sequence, sample(sequence, row), {}});
  } catch (const StepError& error) {
    outcomes_.push_back({&sequence, FinishReason::kNotFinished, error.what()});
  }
}

FinishReason TokenStep::sample(ActiveSequence& sequence, const ComputedRow& row) {
  const ActiveRequest& request = sequence.request();
  const std::span most_likely = std::span(most_likely_).first(request.num_most_likely());
  if (row.highest) {
    const SampledToken sampled = sampler_.sample(sequence.sampler(), *row.highest, sequence.tokens,
                                                 request.wants_log_probs(), most_likely);
    return sequence.append(request.stop(), sampled, nullptr, most_likely);
  }
  if (row.logits == nullptr) {
    if (row.best_token == kUnusableLogits) throw StepError(kUnusableLogitsError);
    if (row.best_token == kEveryTokenForbidden) throw StepError(kEveryTokenForbiddenError);
    return sequence.append(request.stop(), {.token = row.best_token}, nullptr, {});
  }
  const SampledToken sampled =
      sampler_.sample(sequence.sampler(), row.logits, sequence.tokens, request.wants_log_probs(), most_likely,
                      {.allowed = sequence.allowed_tokens(), .logits = row.changed_logits});
  return sequence.append(request.stop(), sampled, row.logits, most_likely);
}

}  // namespace adaptrt
