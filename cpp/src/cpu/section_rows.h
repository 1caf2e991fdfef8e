#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention_plan.h"
#include "step.h"

namespace adaptrt {

/// Data about a section's rows for its ops. Steps reuse the memory, so they allocate nothing.
struct SectionRows {
  std::vector<std::int32_t> sequence_of_token;
  std::vector<std::int32_t> first_local_blocks;
  std::vector<AdapterGroup> groups;
  AttentionPlans attention_plans;

  explicit SectionRows(const std::vector<Op>& ops) : attention_plans(ops) {}

  /// `keys_per_block`: keys in a block of CpuContext::step_local_kv.
  void describe(const StepInput& input, std::int64_t keys_per_block, int num_threads) {
    name_sequences(input);
    place_local_kv(input, keys_per_block);
    group_tokens(input);
    attention_plans.make(input, num_threads);
  }

 private:
  void name_sequences(const StepInput& input) {
    sequence_of_token.resize(input.token_ids.size());
    for (std::size_t sequence = 0; sequence < input.prompt_lengths.size(); ++sequence) {
      std::fill(sequence_of_token.begin() + input.sequence_offsets[sequence],
                sequence_of_token.begin() + input.sequence_offsets[sequence + 1],
                static_cast<std::int32_t>(sequence));
    }
  }

  void place_local_kv(const StepInput& input, std::int64_t keys_per_block) {
    first_local_blocks.clear();
    std::int32_t next = 0;
    for (std::size_t sequence = 0; sequence < input.prompt_lengths.size(); ++sequence) {
      first_local_blocks.push_back(next);
      const std::int64_t tokens = input.sequence_offsets[sequence + 1] - input.sequence_offsets[sequence];
      next += static_cast<std::int32_t>((tokens + keys_per_block - 1) / keys_per_block);
    }
  }

  /// First row of a sequence that its adapter changes; the end of its rows if it changes none.
  static std::int32_t first_adapted_row(const StepInput& input, std::size_t sequence) {
    const std::int32_t begin = input.sequence_offsets[sequence];
    const std::int32_t end = input.sequence_offsets[sequence + 1];
    if (input.adapter_start_positions.empty() || begin == end) return begin;
    const std::int32_t before =
        input.adapter_start_positions[sequence] - input.positions[static_cast<std::size_t>(begin)];
    return std::min(begin + std::max(0, before), end);
  }

  void group_tokens(const StepInput& input) {
    groups.clear();
    for (std::size_t sequence = 0; sequence < input.adapters.size(); ++sequence) {
      const DeviceAdapter* adapter = input.adapters[sequence];
      const std::int32_t end = input.sequence_offsets[sequence + 1];
      const std::int32_t begin = first_adapted_row(input, sequence);
      if (begin == end) continue;
      if (!groups.empty() && groups.back().adapter == adapter && groups.back().end == begin) {
        groups.back().end = end;
      } else if (adapter != nullptr) {
        groups.push_back({begin, end, adapter});
      }
    }
  }
};

}  // namespace adaptrt
