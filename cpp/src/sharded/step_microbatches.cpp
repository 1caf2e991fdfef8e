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
  const auto& offsets = step.sequence_offsets;
  const auto first = static_cast<std::size_t>(std::ranges::upper_bound(offsets, begin) - offsets.begin()) - 1;
  const auto last = static_cast<std::size_t>(std::ranges::lower_bound(offsets, end) - offsets.begin());
  const std::size_t count = last - first;
  const auto sequences_of = [&](std::span<const std::int32_t> array, std::int32_t width) {
    const auto each = static_cast<std::size_t>(width);
    return array.empty() ? array : array.subspan(first * each, count * each);
  };
  for (std::size_t i = 0; i < kStepInputArrays.size(); ++i) {
    auto& array = views_.*(kStepInputArrays[i].member);
    switch (kStepInputArrays[i].axis) {
      case StepAxis::kTokens:
        if (!array.empty()) {
          array = array.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
        }
        break;
      case StepAxis::kSequences:
        array = sequences_of(array, 1);
        break;
      case StepAxis::kBlocks:
        array = sequences_of(array, step.max_blocks_per_sequence);
        break;
      case StepAxis::kCrossBlocks:
        array = sequences_of(array, step.max_cross_blocks);
        break;
      case StepAxis::kOffsets:
        for (const std::int32_t offset : array.subspan(first, count + 1)) {
          lists_[i].push_back(std::clamp(offset, begin, end) - begin);
        }
        break;
      case StepAxis::kRows:
        lists_[i] = rows_within(array, begin, end);
        break;
      case StepAxis::kCopies:
        if (begin > 0) array = {};
        break;
    }
  }
  views_.adapters = step.adapters.subspan(first, count);
}

StepInput Microbatch::input() const {
  StepInput input = views_;
  for (std::size_t i = 0; i < kStepInputArrays.size(); ++i) {
    const StepAxis axis = kStepInputArrays[i].axis;
    if (axis == StepAxis::kOffsets || axis == StepAxis::kRows)
      input.*(kStepInputArrays[i].member) = lists_[i];
  }
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
