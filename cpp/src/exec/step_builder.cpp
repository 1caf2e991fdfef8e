#include "step_builder.h"

#include <algorithm>
#include <utility>

namespace adaptrt {

void StepBuilder::Rows::clear() {
  indices.clear();
  uses.clear();
}

void StepBuilder::Rows::reserve(std::size_t num_rows) {
  indices.reserve(num_rows);
  uses.reserve(num_rows);
}

void StepBuilder::Rows::add(std::int32_t index, const LogitRow& use) {
  indices.push_back(index);
  uses.push_back(use);
}

StepBuilder::StepBuilder(std::int32_t max_rows_with_drafts, const EngineInfo& engine)
    : finds_best_tokens_(engine.finds_best_tokens), finds_highest_logits_(engine.finds_highest_logits) {
  const auto num_rows = static_cast<std::size_t>(max_rows_with_drafts);
  token_ids_.reserve(num_rows);
  positions_.reserve(num_rows);
  rotary_positions_.reserve(num_rows);
  logit_rows_.reserve(num_rows);
  if (finds_best_tokens_) {
    best_token_rows_.reserve(num_rows);
    best_tokens_.reserve(num_rows);
  }
  if (finds_highest_logits_) {
    highest_rows_.reserve(num_rows);
    summaries_.reserve(num_rows);
    highest_.reserve(num_rows * kMaxHighestLogits);
  }
}

StepInput StepBuilder::build(const StepPlan& plan) {
  sequences_.clear();
  token_ids_.clear();
  positions_.clear();
  rotary_positions_.clear();
  has_rotary_positions_ = false;
  token_types_.clear();
  sequence_offsets_.assign(1, 0);
  prompt_lengths_.clear();
  adapters_.clear();
  adapter_start_positions_.clear();
  logit_rows_.clear();
  best_token_rows_.clear();
  highest_rows_.clear();
  num_highest_ = 0;
  hidden_row_indices_.clear();
  hidden_rows_.clear();
  prompt_embedding_rows_.clear();
  prompt_embeddings_.clear();
  copies_from_.clear();
  copies_to_.clear();
  for (const auto& copy : plan.copies) {
    copies_from_.push_back(copy.blocks.from);
    copies_to_.push_back(copy.blocks.to);
  }

  std::size_t max_blocks = 0;
  std::size_t max_later = 0;  // the scheduler made room for all blocks that a sequence can need
  for (const auto& entry : plan.entries) {
    max_blocks = std::max(max_blocks, entry.sequence->memory.blocks().size());
    max_later = std::max(max_later, entry.sequence->memory.blocks().capacity());
  }
  block_tables_.reserve(plan.entries.size() * max_later);
  block_tables_.assign(plan.entries.size() * max_blocks, kNoBlock);

  auto block_table = block_tables_.begin();
  for (const auto& entry : plan.entries) {
    const std::int32_t first_row = sequence_offsets_.back();
    sequences_.push_back(entry.sequence);
    add_tokens(entry);
    add_types(entry, first_row);
    if (static_cast<ActiveSequence*>(entry.sequence)->request().pooler() != nullptr) {
      add_hidden_rows(entry, first_row);
    } else {
      add_logit_rows(entry, first_row);
    }
    add_drafts(entry, first_row + entry.count);
    sequence_offsets_.push_back(first_row + entry.count + entry.num_drafts);
    prompt_lengths_.push_back(entry.sequence->prompt_length);
    adapters_.push_back(entry.sequence->device_adapter());
    adapter_start_positions_.push_back(entry.sequence->adapter_from);
    std::ranges::copy(entry.sequence->memory.blocks(), block_table);
    block_table += static_cast<std::ptrdiff_t>(max_blocks);
  }

  best_tokens_.assign(best_token_rows_.indices.size(), kUnusableLogits);
  summaries_.assign(highest_rows_.indices.size(), {.best_token = kUnusableLogits});
  highest_.assign(summaries_.size() * static_cast<std::size_t>(num_highest_), {});
  if (!token_types_.empty()) token_types_.resize(token_ids_.size());
  StepInput input;
  input.token_ids = token_ids_;
  input.positions = positions_;
  input.token_types = token_types_;
  if (has_rotary_positions_) input.rotary_positions = rotary_positions_;
  input.sequence_offsets = sequence_offsets_;
  input.prompt_lengths = prompt_lengths_;
  input.block_tables = block_tables_;
  input.max_blocks_per_sequence = static_cast<std::int32_t>(max_blocks);
  input.adapters = adapters_;
  input.adapter_start_positions = adapter_start_positions_;
  input.logit_rows = logit_rows_.indices;
  input.best_token_rows = best_token_rows_.indices;
  input.best_tokens = best_tokens_;
  input.highest = {
      .rows = highest_rows_.indices, .count = num_highest_, .summaries = summaries_, .logits = highest_};
  input.hidden_rows = hidden_row_indices_;
  input.prompt_embedding_rows = prompt_embedding_rows_;
  input.prompt_embeddings = prompt_embeddings_;
  input.copies_from = copies_from_;
  input.copies_to = copies_to_;
  if (plan.entries.empty()) return input;
  const SequenceMemory& memory = plan.entries.front().sequence->memory;
  if (memory.states.slot != kNoStateSlot) add_states(plan, input);
  if (memory.cross) add_encoder_inputs(plan, input);
  return input;
}

void StepBuilder::keep_only(const StepPlan& plan) {
  if (plan.entries.size() == sequences_.size()) return;
  for (Rows* rows : {&best_token_rows_, &highest_rows_}) {
    for (LogitRow& use : rows->uses) {
      const auto planned = std::ranges::find(plan.entries, use.sequence, &PlannedSequence::sequence);
      if (planned == plan.entries.end()) use.sequence = nullptr;
    }
  }
}

void StepBuilder::add_states(const StepPlan& plan, StepInput& input) {
  state_slots_.clear();
  state_copies_from_.clear();
  state_copies_to_.clear();
  for (const auto& entry : plan.entries) state_slots_.push_back(entry.sequence->memory.states.slot);
  for (const auto& copy : plan.state_copies) {
    state_copies_from_.push_back(copy.from);
    state_copies_to_.push_back(copy.to);
  }
  input.state_slots = state_slots_;
  input.state_copies_from = state_copies_from_;
  input.state_copies_to = state_copies_to_;
}

void StepBuilder::add_encoder_inputs(const StepPlan& plan, StepInput& input) {
  std::size_t max_blocks = 0;
  for (const auto& entry : plan.entries) {
    max_blocks = std::max(max_blocks, entry.sequence->memory.cross->blocks().size());
  }
  const auto add_table = [&](const Sequence& sequence, std::vector<std::int32_t>& tables) {
    const std::vector<BlockId>& blocks = sequence.memory.cross->blocks();
    tables.insert(tables.end(), blocks.begin(), blocks.end());
    tables.insert(tables.end(), max_blocks - blocks.size(), kNoBlock);
  };
  encoder_lengths_.clear();
  cross_block_tables_.clear();
  for (const auto& entry : plan.entries) {
    encoder_lengths_.push_back(entry.sequence->encoder_length());
    add_table(*entry.sequence, cross_block_tables_);
  }
  encoder_token_ids_.clear();
  encoder_offsets_.assign(1, 0);
  encoder_block_tables_.clear();
  encoder_adapters_.clear();
  encoder_outputs_.clear();
  for (Sequence* sequence : plan.encoded) {
    encoder_token_ids_.insert(encoder_token_ids_.end(), sequence->encoder_tokens->begin(),
                              sequence->encoder_tokens->end());
    encoder_offsets_.push_back(static_cast<std::int32_t>(encoder_token_ids_.size()));
    add_table(*sequence, encoder_block_tables_);
    encoder_adapters_.push_back(sequence->device_adapter());
    encoder_outputs_.push_back(static_cast<ActiveSequence*>(sequence)->request().encoder_output_to_fill());
  }
  input.encoder = {.token_ids = encoder_token_ids_,
                   .offsets = encoder_offsets_,
                   .block_tables = encoder_block_tables_,
                   .adapters = encoder_adapters_,
                   .outputs = encoder_outputs_};
  input.encoder_lengths = encoder_lengths_;
  input.cross_block_tables = cross_block_tables_;
  input.max_cross_blocks = static_cast<std::int32_t>(max_blocks);
}

void StepBuilder::add_tokens(const PlannedSequence& entry) {
  const std::vector<TokenId>& tokens = entry.sequence->tokens;
  for (std::int32_t i = entry.first_token; i < entry.end(); ++i) {
    token_ids_.push_back(std::cmp_less(i, tokens.size()) ? tokens[static_cast<std::size_t>(i)] : 0);
  }
  for (std::int32_t i = 0; i < entry.count; ++i) add_position(entry, entry.first_token + i);
  if (entry.sequence->given) add_given(entry);
}

void StepBuilder::add_position(const PlannedSequence& entry, std::int32_t position) {
  const auto* sequence = static_cast<const ActiveSequence*>(entry.sequence);
  positions_.push_back(position);
  rotary_positions_.push_back(sequence->rotary_position_of(position));
  has_rotary_positions_ = has_rotary_positions_ || sequence->has_rotary_positions();
}

void StepBuilder::add_types(const PlannedSequence& entry, std::int32_t first_row) {
  const auto types = static_cast<ActiveSequence*>(entry.sequence)->request().token_types();
  if (types.empty()) return;
  token_types_.resize(static_cast<std::size_t>(first_row));
  const auto of_entry =
      types.subspan(static_cast<std::size_t>(entry.first_token), static_cast<std::size_t>(entry.count));
  token_types_.insert(token_types_.end(), of_entry.begin(), of_entry.end());
}

void StepBuilder::add_given(const PlannedSequence& entry) {
  const auto* sequence = static_cast<const ActiveSequence*>(entry.sequence);
  for (std::size_t row = token_ids_.size() - static_cast<std::size_t>(entry.count); row < token_ids_.size();
       ++row) {
    const float* embedding = sequence->embedding_of(token_ids_[row]);
    if (embedding == nullptr) continue;
    token_ids_[row] = 0;
    prompt_embedding_rows_.push_back(static_cast<std::int32_t>(row));
    prompt_embeddings_.push_back(embedding);
  }
}

StepBuilder::Rows& StepBuilder::rows_of(const PlannedSequence& entry) {
  const auto* sequence = static_cast<const ActiveSequence*>(entry.sequence);
  const ActiveRequest& request = sequence->request();
  const bool needs_prompt_rows = request.next_prompt_row() < request.end_of_prompt_rows();
  if (!entry.wants_logits || needs_prompt_rows) return logit_rows_;
  const RowNeed need = sequence->row_need();
  if (need.kind == RowNeed::Kind::kBestToken && finds_best_tokens_) return best_token_rows_;
  if (need.kind == RowNeed::Kind::kHighest && finds_highest_logits_) {
    num_highest_ = std::max(num_highest_, need.num_highest);
    return highest_rows_;
  }
  return logit_rows_;
}

void StepBuilder::add_logit_rows(const PlannedSequence& entry, std::int32_t first_row) {
  auto* sequence = static_cast<ActiveSequence*>(entry.sequence);
  const ActiveRequest& request = sequence->request();
  Rows& rows = rows_of(entry);
  const std::int32_t end = entry.first_token + entry.count;
  const std::int32_t sampled = entry.wants_logits ? end - 1 : -1;
  // If a prompt is recomputed after a preemption, rows before next_prompt_row() already exist.
  for (std::int32_t position = std::max(entry.first_token, request.next_prompt_row());
       position < std::min(end, request.end_of_prompt_rows()); ++position) {
    rows.add(first_row + position - entry.first_token,
             {.sequence = sequence, .is_prompt = true, .is_sampled = position == sampled});
  }
  if (sampled < 0 ||
      (!rows.uses.empty() && rows.uses.back().sequence == sequence && rows.uses.back().is_sampled)) {
    return;
  }
  rows.add(first_row + sampled - entry.first_token, {.sequence = sequence, .is_sampled = true});
}

void StepBuilder::add_hidden_rows(const PlannedSequence& entry, std::int32_t first_row) {
  auto* sequence = static_cast<ActiveSequence*>(entry.sequence);
  const Pooler& pooler = *sequence->request().pooler();
  // Rows before next_row() already exist.
  for (std::int32_t position = pooler.next_row(); position < std::min(entry.end(), pooler.end_of_rows());
       position += pooler.row_interval()) {
    hidden_row_indices_.push_back(first_row + position - entry.first_token);
    hidden_rows_.push_back({.sequence = sequence});
  }
}

void StepBuilder::add_drafts(const PlannedSequence& entry, std::int32_t first_row) {
  auto* sequence = static_cast<ActiveSequence*>(entry.sequence);
  if (entry.num_drafts == 0) return;
  Rows& rows = rows_of(entry);
  for (std::int32_t i = 0; i < entry.num_drafts; ++i) {
    const TokenId token = sequence->drafts[static_cast<std::size_t>(i)];
    const std::int32_t position = entry.end() + i;
    token_ids_.push_back(token);
    add_position(entry, position);
    rows.add(first_row + i, {.sequence = sequence,
                             .is_sampled = true,
                             .draft = LogitRow::Draft{.token = token, .position = position}});
  }
}

}  // namespace adaptrt
