#pragma once

// Attention over bfloat16 keys and values on tile registers. Included after tile_product.h and attention.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adaptrt/cpu/attention_tile.h"
#include "attention.h"
#include "tile_few_attention.h"
#include "tile_gemm.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Number of rows that are computed together. Their scores, probabilities and sums stay in the first-level
/// cache together with the tile.
inline constexpr int kAttendedRows = 32;
using AttendedRows = RowBlock<BFloat16Weights, kAttendedRows>;

inline void fetch_next(const FetchingTile& tile) {
  const std::int64_t value_bytes = kKeyGroup * whole_groups(tile.head_dim) * 2;
  for (const KeyGroup& next : tile.next) {
    if (next.keys == nullptr) return;
    for (std::int64_t pair = 0; pair < tile.head_dim / 2; ++pair) {
      __builtin_prefetch(next.keys + pair * tile.slots * 4, 0, 3);
    }
    for (std::int64_t byte = 0; byte < value_bytes; byte += kCacheLine) {
      __builtin_prefetch(next.values + byte, 0, 3);
    }
  }
}

/// Scores of a block's rows with the keys of one tile.
class TileScores {
 public:
  explicit TileScores(const AttentionTile& tile) : tile_(tile), whole_(tile.head_dim / kStepInputs) {
    if (tile.head_dim % kStepInputs != 0) pad_last_step();
  }

  void compute(AttendedRows* block) const {
    const std::int64_t width = tile_.head_dim * 2;
    const StepActivations queries{static_cast<const std::byte*>(tile_.queries) + block->row * width, width,
                                  nullptr, 0};
    for (std::int64_t first = 0; first < block->num_groups;) {
      // Groups that are neighbours in a block are multiplied together.
      std::int64_t end = first + 1;
      while (end < block->num_groups && group(end).keys == group(end - 1).keys + kTileLine) ++end;
      const TileSums to{&block->scores[0][first * kKeyGroup], kTileSlots, false};
      multiply(queries, block->rows, group(first).keys, (end - first) * kKeyGroup, to);
      first = end;
    }
    if (tile_.head_dim % kStepInputs == 0) return;
    multiply_part(queries, whole_ * kStepInputs, tile_.head_dim, {last_, kStepLine, kStepBytes}, block->rows,
                  block->num_groups * kKeyGroup, {block->scores[0], kTileSlots, whole_ > 0});
  }

 private:
  [[nodiscard]] const KeyGroup& group(std::int64_t index) const { return tile_.groups[index]; }

  void multiply(const StepActivations& queries, std::int64_t rows, const std::byte* keys,
                std::int64_t columns, TileSums sums) const {
    const std::int64_t line = tile_.slots * 4;
    const TileColumns columns_of_keys{keys, line, kTileHeight * line};
    if (rows % kTileHeight == 0) {  // no padding needed
      StepPrefetch nothing;
      multiply_steps<BFloat16Dot>({queries.rows, queries.stride, kTileLine}, columns_of_keys, whole_, sums,
                                  rows, columns, &nothing);
      return;
    }
    constexpr std::int64_t kMost = kStretchSteps * kStepInputs;
    for (std::int64_t begin = 0; begin < whole_ * kStepInputs; begin += kMost) {
      multiply_part(queries, begin, std::min(begin + kMost, whole_ * kStepInputs),
                    {keys + begin / 2 * line, line, kTileHeight * line}, rows, columns,
                    {sums.data, sums.stride, begin > 0});
    }
  }

  static void multiply_part(const StepActivations& queries, std::int64_t begin, std::int64_t end,
                            TileColumns keys, std::int64_t rows, std::int64_t columns, TileSums sums) {
    StepPrefetch nothing;
    multiply_inputs(queries, begin, end, keys, sums, rows, columns, &nothing);
  }

  /// Copies the last step of the keys, which is partial, and pads it with zeros.
  void pad_last_step() {
    std::memset(last_, 0, sizeof(last_));
    for (std::int64_t index = 0; index < tile_.num_groups; ++index) {
      for (std::int64_t pair = whole_ * kTileHeight; pair < tile_.head_dim / 2; ++pair) {
        std::memcpy(last_ + (pair - whole_ * kTileHeight) * kStepLine + index * kTileLine,
                    group(index).keys + pair * tile_.slots * 4, kTileLine);
      }
    }
  }

  const AttentionTile& tile_;
  std::int64_t whole_;  ///< number of whole steps
  alignas(kCacheLine) std::byte last_[kStepBytes];
};

/// Adds the values of one tile, weighted by their probabilities, to the accumulators of a block's rows.
class TileValues {
 public:
  explicit TileValues(const AttentionTile& tile) : tile_(tile), columns_(whole_groups(tile.head_dim)) {}

  void add(const AttendedRows& block) const {
    for (std::int64_t first = 0; first < block.num_groups;) {
      std::int64_t end = first + 1;
      while (end < block.num_groups && are_neighbours(end - 1)) ++end;
      const std::int64_t steps = (end - first) / kStepGroups;
      if (steps > 0) {
        add_steps(block, first, steps);
      } else {
        add_gathered(block, first);
      }
      first += std::max<std::int64_t>(1, steps) * kStepGroups;
    }
  }

 private:
  /// Number of groups of slots in a step of k, and number of lines in each group.
  static constexpr std::int64_t kStepGroups = kStepInputs / kKeyGroup;
  static constexpr std::int64_t kGroupLines = kKeyGroup / 2;

  [[nodiscard]] const std::byte* values_of(std::int64_t group) const { return tile_.groups[group].values; }
  /// True if the values of a group and of the next one form a step in memory.
  [[nodiscard]] bool are_neighbours(std::int64_t group) const {
    return values_of(group + 1) == values_of(group) + kGroupLines * columns_ * 4;
  }

  void add_steps(const AttendedRows& block, std::int64_t first, std::int64_t steps) const {
    const std::int64_t line = columns_ * 4;
    for (std::int64_t column = 0; column < columns_; column += kPanelColumns) {
      multiply(block, first, {values_of(first) + column * 4, line, kTileHeight * line}, steps, column);
    }
  }

  /// Adds a step of two groups that are not neighbours, or of the last group.
  void add_gathered(const AttendedRows& block, std::int64_t first) const {
    const std::int64_t line = columns_ * 4;
    for (std::int64_t column = 0; column < columns_; column += kPanelColumns) {
      const std::int64_t count = std::min(kPanelColumns, columns_ - column);
      alignas(kCacheLine) std::byte gathered[kStepBytes];
      std::memset(gathered, 0, sizeof(gathered));
      for (std::int64_t index = first; index < std::min(first + kStepGroups, tile_.num_groups); ++index) {
        const std::byte* from = values_of(index) + column * 4;
        std::byte* to = gathered + (index - first) * kGroupLines * kStepLine;
        for (std::int64_t l = 0; l < kGroupLines; ++l) {
          std::memcpy(to + l * kStepLine, from + l * line, static_cast<std::size_t>(count) * 4);
        }
      }
      multiply(block, first, {gathered, kStepLine, kStepBytes}, 1, column);
    }
  }

  /// Adds steps of values, starting with group `first`, to the accumulators of at most kPanelColumns columns.
  void multiply(const AttendedRows& block, std::int64_t first, TileColumns values, std::int64_t steps,
                std::int64_t column) const {
    const auto* probabilities =
        reinterpret_cast<const std::byte*>(block.probabilities) + first * kKeyGroup * 2;
    StepPrefetch nothing;
    multiply_steps<BFloat16Dot>({probabilities, kTileSlots * 2, kTileLine}, values, steps,
                                {tile_.accumulator + block.row * columns_ + column, columns_, true},
                                block.rows, std::min(kPanelColumns, columns_ - column), &nothing);
  }

  const AttentionTile& tile_;
  std::int64_t columns_;
};

/// A step of values has two groups. If the last group is alone, sets the probabilities of the group after it
/// to zero.
inline void mask_odd_group(AttendedRows* block) {
  if (block->num_groups % 2 == 0) return;
  for (std::int64_t r = 0; r < block->rows; ++r) {
    std::memset(&block->probabilities[r][block->num_groups * kKeyGroup], 0, kKeyGroup * 2);
  }
}

/// Sets the number, the positions and the groups of the rows of a block, whose first row has number `row`.
inline void place_block(const AttentionTile& tile, std::int64_t row, AttendedRows* block) {
  block->row = row;
  block->rows = std::min<std::int64_t>(kAttendedRows, tile.rows - row);
  block->first_position = tile.first_position + row / tile.rows_per_position;
  block->last_position = tile.first_position + (row + block->rows - 1) / tile.rows_per_position;
  block->num_groups = groups_until(tile, block->last_position + tile.look_ahead);
}

/// Attention of a block of rows, which has been placed, to one tile.
template <bool kScaled>
void attend_block(const AttentionTile& tile, const TileScores& scores, const TileValues& values,
                  AttendedRows* block) {
  if (block->num_groups == 0) return;
  scores.compute(block);
  take_scores<kScaled>(tile, block);
  mask_odd_group(block);
  values.add(*block);
}

template <bool kScaled>
void attend_in_tiles(const FetchingTile& tile) {
  fetch_next(tile);
  const TileScores scores(tile);
  const TileValues values(tile);
  AttendedRows block;
  for (std::int64_t row = 0; row < tile.rows; row += kAttendedRows) {
    place_block(tile, row, &block);
    attend_block<kScaled>(tile, scores, values, &block);
  }
}

}  // namespace
}  // namespace adaptrt
