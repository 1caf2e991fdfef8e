#include "adaptrt/sharded/step_microbatches.h"

#include <algorithm>
#include <cstddef>
#include <span>

namespace adaptrt {
namespace {

/// Returns the elements of ascending `rows` within [begin, end), minus `begin`.
std::vector<std::int32_t> rows_within(std::span<const std::int32_t> rows, std::int32_t begin,
                                      std::int32_t end) {
  std::vector<std::int32_t> found(std::ranges::lower_bound(rows, begin), std::ranges::lower_bound(rows, end));
  for (std::int32_t& row : found) row -= begin;
  return found;
}

}  // namespace

Microbatch::Microbatch(const StepInput& step, std::int32_t begin, std::int32_t end) : views_(step) {
  const auto first_token = static_cast<std::size_t>(begin);
  const auto tokens = static_cast<std::size_t>(end - begin);
  views_.token_ids = step.token_ids.subspan(first_token, tokens);
  views_.positions = step.positions.subspan(first_token, tokens);
  if (!step.token_types.empty()) views_.token_types = step.token_types.subspan(first_token, tokens);
  const auto& offsets = step.sequence_offsets;
  const auto first = static_cast<std::size_t>(std::ranges::upper_bound(offsets, begin) - offsets.begin()) - 1;
  const auto last = static_cast<std::size_t>(std::ranges::lower_bound(offsets, end) - offsets.begin());
  for (std::size_t i = first; i <= last; ++i) {
    sequence_offsets_.push_back(std::clamp(offsets[i], begin, end) - begin);
  }
  const std::size_t count = last - first;
  const auto blocks = static_cast<std::size_t>(step.max_blocks_per_sequence);
  views_.prompt_lengths = step.prompt_lengths.subspan(first, count);
  views_.block_tables = step.block_tables.subspan(first * blocks, count * blocks);
  views_.adapters = step.adapters.subspan(first, count);
  if (!step.adapters_from.empty()) views_.adapters_from = step.adapters_from.subspan(first, count);
  if (!step.encoder_lengths.empty()) {
    const auto cross_blocks = static_cast<std::size_t>(step.max_cross_blocks);
    views_.encoder_lengths = step.encoder_lengths.subspan(first, count);
    views_.cross_block_tables = step.cross_block_tables.subspan(first * cross_blocks, count * cross_blocks);
  }
  if (begin > 0) views_.copies_from = views_.copies_to = {};
  logit_rows_ = rows_within(step.logit_rows, begin, end);
  hidden_rows_ = rows_within(step.hidden_rows, begin, end);
}

StepInput Microbatch::input() const {
  StepInput input = views_;
  input.sequence_offsets = sequence_offsets_;
  input.logit_rows = logit_rows_;
  input.hidden_rows = hidden_rows_;
  return input;
}

std::vector<Microbatch> split_into_microbatches(const StepInput& step, const EngineInfo& info) {
  const auto tokens = static_cast<std::int32_t>(step.token_ids.size());
  const bool can_be_cut =
      step.encoder.empty() && step.logit_rows.size() <= static_cast<std::size_t>(info.max_batch_size);
  std::vector<Microbatch> microbatches;
  if (can_be_cut && !info.has_kv_cache) {
    for (const SequenceRun& run : runs_of_whole_sequences(step.sequence_offsets)) {
      microbatches.emplace_back(step, step.sequence_offsets[run.first], step.sequence_offsets[run.last]);
    }
    return microbatches;
  }
  const std::int32_t count = can_be_cut ? std::max(1, tokens / kMinMicrobatchTokens) : 1;
  for (std::int32_t microbatch = 0; microbatch < count; ++microbatch) {
    microbatches.emplace_back(step, static_cast<std::int32_t>(std::int64_t{tokens} * microbatch / count),
                              static_cast<std::int32_t>(std::int64_t{tokens} * (microbatch + 1) / count));
  }
  return microbatches;
}

}  // namespace adaptrt
