#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "active_request.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/sample/log_softmax.h"
#include "adaptrt/sample/sampler.h"
#include "post_processing.h"
#include "step_builder.h"

namespace adaptrt {

/// The result of a step for one sequence.
struct TokenOutcome {
  ActiveSequence* sequence = nullptr;
  FinishReason reason = FinishReason::kNotFinished;
  /// Why no token could be chosen, or the prompt has no log probs; usually empty.
  std::string error;
};

/// Turns a step's logits into tokens: collects the logits and log probs that requests return, samples the
/// next tokens, and finds the sequences that have ended. All sequences of a request get their first token
/// from the last row of the prompt. A draft's row counts only if the chosen token equals the draft and the
/// sequence has not ended; otherwise it is ignored. Hidden states go to the poolers of their requests, which
/// end with the last one.
class TokenStep {
 public:
  explicit TokenStep(const EngineInfo& engine)
      : logits_width_(engine.logits_width()),
        hidden_size_(engine.hidden_size),
        sampler_(engine.vocab_size, engine.lora.max_extra_tokens) {}

  /// The step's rows must not change until it is finished.
  void begin(const StepBuilder& step);
  /// See LogitsSink.
  void take(std::int64_t first_row, std::int64_t num_rows, const float* logits);
  /// See HiddenSink.
  void take_hidden(std::int64_t first_row, std::int64_t num_rows, const float* hidden);
  /// Takes what the engine found of the step's best_token_rows and highest_rows.
  void take_found(const StepBuilder& step);
  /// Call it after the last row: samples for requests with post-processors.
  void finish();
  /// One for each sequence whose next token was due, and for each that failed before. Outcomes of a prompt's
  /// last row are contiguous, the first sequence's first.
  [[nodiscard]] std::span<const TokenOutcome> outcomes() const { return outcomes_; }
  /// Requests whose beams have all their rows: call ActiveBeams::advance().
  [[nodiscard]] std::span<ActiveRequest* const> searches() const { return searches_; }

 private:
  /// A row as the step computed it: its logits, its highest logits or its best token.
  struct ComputedRow {
    const float* logits = nullptr;
    /// Used if `logits` is nullptr.
    std::optional<HighestLogits> highest = std::nullopt;
    /// See StepInput::best_tokens; used if there is nothing else.
    std::int32_t best_token = kUnusableLogits;
    /// The logits after the post-processor; nullptr without one.
    const float* changed_logits = nullptr;
  };

  void take_row(const LogitRow& row, const ComputedRow& computed);
  void take_draft_row(const LogitRow& row, const ComputedRow& computed);
  void take_row_of_beam(ActiveSequence& sequence, const float* logits);
  /// Takes the row that the next token of a sequence is chosen from.
  void take_sampled_row(ActiveSequence& sequence, const ComputedRow& row);
  /// Adds the outcome.
  void choose(ActiveSequence& sequence, const ComputedRow& row);
  [[nodiscard]] FinishReason sample(ActiveSequence& sequence, const ComputedRow& row);

  std::int64_t logits_width_;
  std::int64_t hidden_size_;
  Sampler sampler_;
  PostProcessing post_processing_;
  std::span<const LogitRow> rows_;
  std::span<const HiddenRow> hidden_rows_;
  std::vector<TokenOutcome> outcomes_;
  std::vector<ActiveRequest*> searches_;
  std::array<TokenLogProb, kMaxTopLogProbs> most_likely_;
};

}  // namespace adaptrt
