#pragma once

// Attention of many rows over bfloat16 keys and values: the vectors' softmax of one block of rows runs while
// tiles multiply the scores of the next block and the values of the block before. The bits are those of
// attend_in_tiles. Included after tile_attention.h.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "adaptrt/cpu/attention_tile.h"
#include "tile_attention.h"

namespace adaptrt {
namespace {

/// A block of rows on its way through the pipeline, and the tile that it attends to.
struct AttendingBlock {
  AttendedRows rows;
  std::optional<AttentionTile> tile;
};

/// take_vectors for a block of whole tiles, row by row. Each score is loaded once, so that a row takes few
/// instructions.
class SoftmaxRows {
 public:
  /// nullptr: there is nothing to do.
  explicit SoftmaxRows(AttendingBlock* block)
      : rows_(block == nullptr ? nullptr : &block->rows), tile_(block == nullptr ? nullptr : &*block->tile) {
    if (rows_ == nullptr) return;
    next_ = 0;
    finish_scores<false>(*tile_, rows_);
  }

  /// Takes one more row, if there is one.
  __attribute__((always_inline)) void take_next() {
    if (next_ >= kAttendedRows) return;
    const std::int64_t r = next_++;
    const std::int64_t row = rows_->row + r;
    Simd::Vec scores[kVectors];
    for (int v = 0; v < kVectors; ++v) scores[v] = Simd::load(rows_->scores[r] + v * Simd::kLanes);
    Simd::Vec greatest = scores[0];
    for (int v = 1; v < kVectors; ++v) greatest = Simd::max(greatest, scores[v]);
    if (Simd::any_above(greatest, Simd::set(tile_->row_max[row] + kHeadroom))) {
      raise_row_max(*tile_, row, Simd::greatest(greatest));
    }
    const Simd::Vec row_max = Simd::set(tile_->row_max[row]);
    float* row_sum = tile_->row_sum + row * kKeyGroup;
    Simd::Vec total = Simd::load(row_sum);
    for (int v = 0; v < kVectors; ++v) {
      scores[v] = exp2_of<true>(Simd::sub(scores[v], row_max));
      total = Simd::add(total, scores[v]);
    }
    for (int v = 0; v < kVectors; v += 2) {
      store_probabilities(&rows_->probabilities[r][v * Simd::kLanes], scores[v], scores[v + 1]);
    }
    Simd::store(row_sum, total);
  }

  __attribute__((always_inline)) void finish() {
    while (next_ < kAttendedRows) take_next();
  }

 private:
  static constexpr int kVectors = static_cast<int>(kVectorsPerTile);
  static_assert(kVectors % 2 == 0);
  AttendedRows* rows_;
  const AttentionTile* tile_;
  std::int64_t next_ = kAttendedRows;
};

/// multiply_2x2, with a row of the softmax after each product of tiles.
inline void multiply_during_softmax(TileRows a, TileColumns b, std::int64_t steps, TileSums sums,
                                    SoftmaxRows* softmax) {
  const std::int64_t sums_row = sums.stride * 4;
  float* below = sums.data + kTileHeight * sums.stride;
  if (sums.continues) {
    Tiles::load<0>(sums.data, sums_row);
    Tiles::load<1>(sums.data + kTileColumns, sums_row);
    Tiles::load<2>(below, sums_row);
    Tiles::load<3>(below + kTileColumns, sums_row);
  } else {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    const std::byte* first = a.data + s * a.step;
    const std::byte* columns = b.data + s * b.step;
    Tiles::load<4>(first, a.row);
    Tiles::load<6>(columns, b.line);
    BFloat16Dot::add<0, 4, 6>();
    softmax->take_next();
    Tiles::load<7>(columns + kTileLine, b.line);
    BFloat16Dot::add<1, 4, 7>();
    softmax->take_next();
    Tiles::load<5>(first + kTileHeight * a.row, a.row);
    BFloat16Dot::add<2, 5, 6>();
    softmax->take_next();
    BFloat16Dot::add<3, 5, 7>();
    softmax->take_next();
  }
  Tiles::store<0>(sums.data, sums_row);
  Tiles::store<1>(sums.data + kTileColumns, sums_row);
  Tiles::store<2>(below, sums_row);
  Tiles::store<3>(below + kTileColumns, sums_row);
}

class AttentionPipeline {
 public:
  explicit AttentionPipeline(std::int64_t head_dim) : columns_(whole_groups(head_dim)) {}

  /// True if these rows have blocks for the pipeline. There must be several blocks: while the softmax
  /// rescales the sums of one, values are added to those of another.
  static bool suits(const AttentionRows& rows) {
    return rows.rows > kAttendedRows && rows.head_dim % kStepInputs == 0 && !rows.is_int8;
  }

  /// True if the tile is whole, and its groups are pairs of neighbours in a block of slots.
  [[nodiscard]] bool suits(const AttentionTile& tile) const {
    if (tile.num_groups != kTileGroups) return false;
    const std::int64_t value_bytes = kKeyGroup * columns_ * 2;
    for (std::int64_t group = 0; group < kTileGroups; group += 2) {
      const KeyGroup& first = tile.groups[group];
      const KeyGroup& second = tile.groups[group + 1];
      if (second.keys != first.keys + kTileLine || second.values != first.values + value_bytes) return false;
    }
    return true;
  }

  /// Adds a block of kAttendedRows rows that attend to all groups of a tile. It must have other rows than the
  /// block that was added before.
  void add(const AttentionTile& tile, std::int64_t row) {
    AttendingBlock* block = &blocks_[next_];
    next_ = (next_ + 1) % kBlocks;
    block->tile.emplace(tile);
    place_block(tile, row, &block->rows);
    advance(block);
  }

  /// Finishes all blocks.
  void finish() {
    while (scored_ != nullptr || weighted_ != nullptr) advance(nullptr);
  }

 private:
  static constexpr std::size_t kBlocks = 3;
  static constexpr std::int64_t kStepGroups = kStepInputs / kKeyGroup;

  /// Moves all blocks on by one stage; `block` enters unless it is nullptr.
  void advance(AttendingBlock* block) {
    SoftmaxRows softmax(scored_);
    if (weighted_ != nullptr) add_values(*weighted_, &softmax);
    if (block != nullptr) score(block, &softmax);
    softmax.finish();
    weighted_ = scored_;
    scored_ = block;
  }

  static void score(AttendingBlock* block, SoftmaxRows* softmax) {
    const AttentionTile& tile = *block->tile;
    const std::int64_t width = tile.head_dim * 2;
    const std::int64_t line = tile.slots * 4;
    const auto* queries = static_cast<const std::byte*>(tile.queries) + block->rows.row * width;
    for (std::int64_t group = 0; group < kTileGroups; group += kStepGroups) {
      multiply_during_softmax({queries, width, kTileLine},
                              {tile.groups[group].keys, line, kTileHeight * line},
                              tile.head_dim / kStepInputs,
                              {&block->rows.scores[0][group * kKeyGroup], kTileSlots, false}, softmax);
    }
  }

  void add_values(const AttendingBlock& block, SoftmaxRows* softmax) const {
    const AttentionTile& tile = *block.tile;
    const auto* probabilities = reinterpret_cast<const std::byte*>(block.rows.probabilities);
    const std::byte* values = tile.groups[0].values;
    static_assert(kTileGroups == 2 * kStepGroups, "the second step may be anywhere");
    const std::int64_t step = tile.groups[kStepGroups].values - values;
    for (std::int64_t column = 0; column < columns_; column += kPairColumns) {
      multiply_during_softmax({probabilities, kTileSlots * 2, kTileLine},
                              {values + column * 4, columns_ * 4, step}, kTileGroups / kStepGroups,
                              {tile.accumulator + block.rows.row * columns_ + column, columns_, true},
                              softmax);
    }
  }

  std::int64_t columns_;
  AttendingBlock blocks_[kBlocks];
  std::size_t next_ = 0;
  AttendingBlock* scored_ = nullptr;    ///< has scores
  AttendingBlock* weighted_ = nullptr;  ///< has probabilities
};

inline void attend_in_pipeline(const AttentionRows& rows, const KeyTiles& tiles) {
  AttentionPipeline pipeline(rows.head_dim);
  AttendedRows block;
  for (std::int64_t first = 0; first < tiles.attended; first += kTileGroups) {
    const FetchingTile tile(rows, tiles, first);
    if (!pipeline.suits(tile)) {
      pipeline.finish();
      attend_in_tiles<false>(tile);
      continue;
    }
    fetch_next(tile);
    const TileScores scores(tile);
    const TileValues values(tile);
    for (std::int64_t row = 0; row < tile.rows; row += kAttendedRows) {
      place_block(tile, row, &block);
      if (block.rows == kAttendedRows && block.num_groups == kTileGroups) {
        pipeline.add(tile, row);
      } else {
        // Its rows may be in the pipeline with the tile before.
        pipeline.finish();
        attend_block<false>(tile, scores, values, &block);
      }
    }
  }
  pipeline.finish();
}

void tile_attend(const AttentionRows& rows, const KeyTiles& tiles) {
  if (rows.rows <= kFewAttendedRows) {
    attend_few_rows(rows, tiles);
    return;
  }
  Tiles::configure();
  if (AttentionPipeline::suits(rows)) {
    attend_in_pipeline(rows, tiles);
    return;
  }
  for (std::int64_t first = 0; first < tiles.attended; first += kTileGroups) {
    const FetchingTile tile(rows, tiles, first);
    if (tile.is_int8) {
      const WidenedGroups<BFloat16Weights> widened(tile);
      AttentionRows of_scratch = rows;
      of_scratch.slots = kTileSlots;
      attend_in_tiles<true>({of_scratch, widened.tiles(tile.num_groups), 0});
    } else {
      attend_in_tiles<false>(tile);
    }
  }
}

}  // namespace
}  // namespace adaptrt
