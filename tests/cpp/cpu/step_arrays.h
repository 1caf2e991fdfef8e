#pragma once

// Steps of an engine's tests, and what comes of them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"

namespace adaptrt::testing {

/// The tokens of a sequence in a step.
struct Piece {
  std::vector<std::int32_t> tokens = {};
  std::int32_t first_position = 0;
  std::int32_t prompt_length = 1;
  std::vector<std::int32_t> blocks = {};
  const DeviceAdapter* adapter = nullptr;
  std::int32_t adapter_from = 0;
};

/// A StepInput with the arrays that it refers to.
class StepArrays {
 public:
  explicit StepArrays(const std::vector<Piece>& pieces) {
    std::size_t width = 1;
    for (const auto& piece : pieces) width = std::max(width, piece.blocks.size());
    max_blocks = static_cast<std::int32_t>(width);
    offsets.push_back(0);
    for (const auto& piece : pieces) {
      for (std::size_t i = 0; i < piece.tokens.size(); ++i) {
        logit_rows.push_back(static_cast<std::int32_t>(tokens.size()));
        tokens.push_back(piece.tokens[i]);
        positions.push_back(piece.first_position + static_cast<std::int32_t>(i));
      }
      offsets.push_back(static_cast<std::int32_t>(tokens.size()));
      prompt_lengths.push_back(piece.prompt_length);
      for (std::size_t i = 0; i < width; ++i)
        tables.push_back(i < piece.blocks.size() ? piece.blocks[i] : -1);
      adapters.push_back(piece.adapter);
      adapter_start_positions.push_back(piece.adapter_from);
    }
  }

  [[nodiscard]] StepInput input() const {
    return {.token_ids = tokens,
            .positions = positions,
            .token_types = token_types,
            .rotary_positions = rotary_positions,
            .sequence_offsets = offsets,
            .prompt_lengths = prompt_lengths,
            .block_tables = tables,
            .max_blocks_per_sequence = max_blocks,
            .adapters = adapters,
            .adapter_start_positions = adapter_start_positions,
            .logit_rows = logit_rows,
            .copies_from = copies_from,
            .copies_to = copies_to,
            .hidden_rows = hidden_rows,
            .prompt_embedding_rows = prompt_embedding_rows,
            .prompt_embeddings = prompt_embeddings,
            .state_slots = state_slots,
            .state_copies_from = state_copies_from,
            .state_copies_to = state_copies_to};
  }

  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> token_types;
  std::vector<std::int32_t> rotary_positions;
  std::vector<std::int32_t> offsets;
  std::vector<std::int32_t> prompt_lengths;
  std::vector<std::int32_t> tables;
  std::int32_t max_blocks = 0;
  std::vector<const DeviceAdapter*> adapters;
  std::vector<std::int32_t> adapter_start_positions;
  std::vector<std::int32_t> prompt_embedding_rows;
  std::vector<const float*> prompt_embeddings;
  /// All rows, unless changed.
  std::vector<std::int32_t> logit_rows;
  std::vector<std::int32_t> copies_from;
  std::vector<std::int32_t> copies_to;
  std::vector<std::int32_t> hidden_rows;
  std::vector<std::int32_t> state_slots;
  std::vector<std::int32_t> state_copies_from;
  std::vector<std::int32_t> state_copies_to;
};

/// Rows of a step whose best tokens or highest logits are wanted, and what the engine finds.
struct FoundRows {
  /// Adds the rows to a step, with places for `count` logits of each; the best tokens are -9 until then.
  void add_to(StepInput& input, std::int32_t count) {
    best_tokens.assign(best_rows.size(), -9);
    summaries.resize(highest_rows.size());
    highest.resize(highest_rows.size() * static_cast<std::size_t>(count));
    input.best_token_rows = best_rows;
    input.best_tokens = best_tokens;
    input.highest = {.rows = highest_rows, .count = count, .summaries = summaries, .logits = highest};
  }

  std::vector<std::int32_t> best_rows;
  std::vector<std::int32_t> highest_rows;
  std::vector<std::int32_t> best_tokens;
  std::vector<RowSummary> summaries;
  std::vector<TokenLogit> highest;
};

/// The logits of a step, [R][vocab_size], and its hidden states, [H][hidden_size].
struct StepResults {
  std::vector<float> logits;
  std::vector<float> hidden;
};

inline StepResults results_of(Engine* engine, const StepInput& input) {
  const auto into = [](std::vector<float>& all, std::size_t rows, std::int64_t width) {
    all.assign(rows * static_cast<std::size_t>(width), std::nanf(""));
    return [&all, width](std::int64_t first, std::int64_t count, const float* values) {
      std::copy_n(values, count * width, all.begin() + first * width);
    };
  };
  StepResults results;
  engine->step(input, into(results.logits, input.logit_rows.size(), engine->info().vocab_size),
               into(results.hidden, input.hidden_rows.size(), engine->info().hidden_size));
  return results;
}

/// Returns the logits of a step, [R][vocab_size].
inline std::vector<float> logits_of(Engine* engine, const StepInput& input) {
  return results_of(engine, input).logits;
}

}  // namespace adaptrt::testing
