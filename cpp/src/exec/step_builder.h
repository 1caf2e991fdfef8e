#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "active_request.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

/// The use of a row of logits, or of its best token.
struct LogitRow {
  ActiveSequence* sequence = nullptr;  ///< nullptr: the row is ignored
  bool is_prompt = false;              ///< it is the request's next_prompt_row()
  bool is_sampled = false;             ///< the next token is chosen from it
  /// Row of a draft: the next token is chosen from it only if the sequence's newest token is `token`, at this
  /// position.
  struct Draft {
    TokenId token = 0;
    std::int32_t position = 0;
  };
  std::optional<Draft> draft = std::nullopt;
};

/// The use of a hidden state: the next row of the request's pooler.
struct HiddenRow {
  ActiveSequence* sequence = nullptr;
};

/// Converts a plan to the arrays of a StepInput. Reuses their memory in each step.
class StepBuilder {
 public:
  /// Steps with at most this many rows of logits allocate nothing for them. Rows of which less is needed are
  /// not logit_rows if the engine finds that.
  StepBuilder(std::int32_t max_rows_with_drafts, const EngineInfo& engine);

  /// The result is valid until the next call, also if this object is swapped with another. All sequences of
  /// the plan must be ActiveSequences. Tokens that they do not have yet are 0: see Engine::begin_ahead.
  [[nodiscard]] StepInput build(const StepPlan& plan);
  /// Ignores the results of sequences that are no longer in the plan that was built.
  void keep_only(const StepPlan& plan);
  /// Sequences of the built plan, in its order. Those that have left the plan since may no longer exist.
  [[nodiscard]] std::span<const Sequence* const> sequences() const { return sequences_; }
  /// One for each entry of StepInput::logit_rows.
  [[nodiscard]] std::span<const LogitRow> logit_rows() const { return logit_rows_.uses; }
  /// One for each entry of StepInput::best_token_rows.
  [[nodiscard]] std::span<const LogitRow> best_token_rows() const { return best_token_rows_.uses; }
  /// StepInput::best_tokens, which the step writes.
  [[nodiscard]] std::span<const std::int32_t> best_tokens() const { return best_tokens_; }
  /// One for each of the rows of StepInput::highest.
  [[nodiscard]] std::span<const LogitRow> highest_rows() const { return highest_rows_.uses; }
  /// Results of the step for row i of these.
  [[nodiscard]] HighestLogits highest(std::size_t i) const {
    const auto count = static_cast<std::size_t>(num_highest_);
    return {.summary = summaries_[i], .highest = std::span(highest_).subspan(i * count, count)};
  }
  /// One for each entry of StepInput::hidden_rows.
  [[nodiscard]] std::span<const HiddenRow> hidden_rows() const { return hidden_rows_; }

 private:
  /// Rows of one kind. All rows of a sequence are of the same kind.
  struct Rows {
    std::vector<std::int32_t> indices;
    std::vector<LogitRow> uses;

    void clear();
    void reserve(std::size_t num_rows);
    void add(std::int32_t index, const LogitRow& use);
  };

  /// The kind of a sequence's rows. Makes room for its number of highest logits.
  [[nodiscard]] Rows& rows_of(const PlannedSequence& entry);
  void add_tokens(const PlannedSequence& entry);
  void add_position(const PlannedSequence& entry, std::int32_t position);
  /// Replaces the virtual tokens that were added last by their embeddings.
  void add_given(const PlannedSequence& entry);
  void add_logit_rows(const PlannedSequence& entry, std::int32_t first_row);
  void add_hidden_rows(const PlannedSequence& entry, std::int32_t first_row);
  /// Adds the types of prompt tokens. Sequences without types are filled in by the next one that has them, or
  /// not at all.
  void add_types(const PlannedSequence& entry, std::int32_t first_row);
  void add_drafts(const PlannedSequence& entry, std::int32_t first_row);
  /// For engines with states: adds the slots of all sequences, and the copies.
  void add_states(const StepPlan& plan, StepInput& input);
  /// For engines with an encoder: adds the inputs that the step computes, and the blocks of all sequences.
  void add_encoder_inputs(const StepPlan& plan, StepInput& input);

  std::vector<const Sequence*> sequences_;
  std::vector<std::int32_t> token_ids_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int32_t> rotary_positions_;
  /// True if a sequence of the step has rotary positions of its own.
  bool has_rotary_positions_ = false;
  std::vector<std::int32_t> token_types_;
  std::vector<std::int32_t> sequence_offsets_;
  std::vector<std::int32_t> prompt_lengths_;
  std::vector<std::int32_t> block_tables_;
  std::vector<const DeviceAdapter*> adapters_;
  std::vector<std::int32_t> adapter_start_positions_;
  std::vector<std::int32_t> copies_from_;
  std::vector<std::int32_t> copies_to_;
  std::vector<std::int32_t> state_slots_;
  std::vector<std::int32_t> state_copies_from_;
  std::vector<std::int32_t> state_copies_to_;
  std::vector<std::int32_t> encoder_token_ids_;
  std::vector<std::int32_t> encoder_offsets_;
  std::vector<std::int32_t> encoder_block_tables_;
  std::vector<const DeviceAdapter*> encoder_adapters_;
  std::vector<float*> encoder_outputs_;
  std::vector<std::int32_t> encoder_lengths_;
  std::vector<std::int32_t> cross_block_tables_;
  bool finds_best_tokens_;
  bool finds_highest_logits_;
  Rows logit_rows_;
  Rows best_token_rows_;
  std::vector<std::int32_t> best_tokens_;
  Rows highest_rows_;
  std::int32_t num_highest_ = 0;  // logits of each of these rows
  std::vector<RowSummary> summaries_;
  std::vector<TokenLogit> highest_;
  std::vector<std::int32_t> hidden_row_indices_;
  std::vector<HiddenRow> hidden_rows_;
  std::vector<std::int32_t> prompt_embedding_rows_;
  std::vector<const float*> prompt_embeddings_;
};

}  // namespace adaptrt
