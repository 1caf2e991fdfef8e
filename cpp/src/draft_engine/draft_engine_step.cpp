// Steps of one draft engine call.

#include <algorithm>
#include <iterator>

#include "adaptrt/draft_engine/draft_engine.h"

namespace adaptrt {

void DraftEngine::compute_texts() {
  std::ranges::sort(entries_, {}, &Entry::num_to_compute);
  std::int32_t left = engine_.info().max_num_tokens;
  clear_step();
  for (Entry& entry : entries_) {
    const DraftSequence& sequence = *entry.task->sequence;
    const std::int32_t count = std::min(entry.num_to_compute, left);
    const bool is_all = count == entry.num_to_compute;
    entry.num_to_compute = count;
    if (count == 0) continue;
    left -= count;
    add_to_step(*entry.task,
                entry.task->text.subspan(static_cast<std::size_t>(sequence.memory_.num_computed),
                                         static_cast<std::size_t>(count)),
                sequence.memory_.num_computed, is_all);
  }
  if (step_.prompt_lengths.empty()) return;
  run_step();
  for (const Entry& entry : entries_) {
    DraftSequence& sequence = *entry.task->sequence;
    memory_.keep(sequence.memory_, sequence.memory_.num_computed + entry.num_to_compute);
    if (entry.task->prompt_length > engine_.info().max_reusable_prompt_len) continue;
    memory_.share(sequence.memory_, {.key = sequence.reuse_key(), .tokens = entry.task->text});
  }
}

bool DraftEngine::compute_drafts() {
  clear_step();
  for (const Entry& entry : entries_) {
    const std::vector<std::int32_t>& drafts = *entry.task->drafts;
    if (drafts.empty() || std::cmp_equal(drafts.size(), entry.most)) continue;
    DraftSequence& sequence = *entry.task->sequence;
    add_to_step(*entry.task, std::span(drafts).last(1),
                sequence.memory_.num_computed + static_cast<std::int32_t>(drafts.size()) - 1, true);
    sequence.computed_drafts_.push_back(drafts.back());
  }
  if (step_.prompt_lengths.empty()) return false;
  run_step();
  return true;
}

void DraftEngine::clear_step() {
  step_.token_ids.clear();
  step_.positions.clear();
  step_.sequence_offsets.assign(1, 0);
  step_.prompt_lengths.clear();
  step_.block_tables.clear();
  step_.adapters.clear();
  step_.logit_rows.clear();
  step_.drafts.clear();
}

void DraftEngine::add_to_step(const DraftTask& task, std::span<const std::int32_t> tokens,
                              std::int32_t position, bool wants_draft) {
  const DraftSequence& sequence = *task.sequence;
  step_.token_ids.insert(step_.token_ids.end(), tokens.begin(), tokens.end());
  for (std::size_t i = 0; i < tokens.size(); ++i) step_.positions.push_back(position++);
  step_.sequence_offsets.push_back(static_cast<std::int32_t>(step_.token_ids.size()));
  step_.prompt_lengths.push_back(task.prompt_length);
  step_.adapters.push_back(sequence.lease_ ? &sequence.lease_->adapter() : nullptr);
  // All rows have the length of the longest possible text, so that only their number changes.
  const auto row_length = static_cast<std::size_t>(memory_.blocks_for(engine_.info().max_seq_len));
  const std::vector<BlockId>& blocks = sequence.memory_.blocks();
  step_.block_tables.insert(step_.block_tables.end(), blocks.begin(), blocks.end());
  step_.block_tables.resize(step_.prompt_lengths.size() * row_length, kNoBlock);
  if (!wants_draft) return;
  step_.logit_rows.push_back(static_cast<std::int32_t>(step_.token_ids.size()) - 1);
  step_.drafts.push_back(task.drafts);
}

void DraftEngine::run_step() {
  StepInput input{.token_ids = step_.token_ids,
                  .positions = step_.positions,
                  .sequence_offsets = step_.sequence_offsets,
                  .prompt_lengths = step_.prompt_lengths,
                  .block_tables = step_.block_tables,
                  .max_blocks_per_sequence = memory_.blocks_for(engine_.info().max_seq_len),
                  .adapters = step_.adapters,
                  .logit_rows = step_.logit_rows};
  if (engine_.info().finds_best_tokens) {
    step_.best_tokens.resize(step_.logit_rows.size());
    input.logit_rows = {};
    input.best_token_rows = step_.logit_rows;
    input.best_tokens = step_.best_tokens;
  }
  engine_.step(input, [this](std::int64_t first_row, std::int64_t num_rows, const float* logits) {
    const EngineInfo& info = engine_.info();
    for (std::int64_t row = first_row; row < first_row + num_rows; ++row, logits += info.logits_width()) {
      step_.drafts[static_cast<std::size_t>(row)]->push_back(
          static_cast<std::int32_t>(std::max_element(logits, logits + info.vocab_size) - logits));
    }
  });
  for (std::size_t row = 0; row < input.best_tokens.size(); ++row) {
    // Without a best token any draft will do: at worst, it is wrong.
    step_.drafts[row]->push_back(std::max(input.best_tokens[row], 0));
  }
  ++stats_.num_steps;
  stats_.num_tokens += std::ssize(step_.token_ids);
}

}  // namespace adaptrt
