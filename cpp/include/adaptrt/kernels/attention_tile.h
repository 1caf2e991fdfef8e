#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/dtype.h"

namespace adaptrt {

// The layout of keys and values for attention, and the kernels' part of it. Slots of a KV block are taken in
// groups of kKeyGroup, whatever the instruction set; a block has whole groups, so the last may have slots
// without tokens. With ki = k_interleave(dtype), and columns(head_dim) = head_dim up to a multiple of 16:
//
//   keys:   [head_dim / ki][slots][ki]           a panel of the matrix [slots, head_dim]
//   values: [slots / ki][columns(head_dim)][ki]  a panel of the matrix [columns(head_dim), slots]
//
// int8 keys and values have ki = 2 whatever the type, and a float32 scale a slot.
inline constexpr std::int64_t kKeyGroup = 16;
/// Groups in a tile, the unit of the online softmax.
inline constexpr std::int64_t kTileGroups = 4;
inline constexpr std::int64_t kTileSlots = kKeyGroup * kTileGroups;

/// `size` up to whole groups of 16.
[[nodiscard]] constexpr std::int64_t whole_groups(std::int64_t size) {
  return (size + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
}

/// Up to kKeyGroup consecutive tokens of a sequence in neighbouring slots of a block.
struct KeyGroup {
  const std::byte* keys = nullptr;    ///< of the first slot
  const std::byte* values = nullptr;  ///< of the first slot
  const float* key_scales = nullptr;  ///< int8: [kKeyGroup]
  const float* value_scales = nullptr;
  std::int64_t first_position = 0;  ///< in the sequence, of the first slot
  std::int64_t count = 0;           ///< slots that have tokens
};

/// Queries that share a key-value head, and what the keys and values before made of them.
///
/// Rows are ordered by position: row r belongs to position first_position + r / rows_per_position. A row sees
/// the keys of positions up to `look_ahead` beyond its own, with a `sliding_window` of those from
/// sliding_window - 1 before its own on. What is in other slots does not matter for keys; their values must
/// be finite. A row's results depend on its own position and on the keys and values it sees alone, provided
/// that the tiles of a sequence begin at the same groups.
struct AttentionRows {
  /// [rows, head_dim], in activation_dtype, multiplied by the scale of the scores and by log2(e).
  const void* queries = nullptr;
  std::int64_t rows = 0;
  std::int64_t rows_per_position = 1;
  std::int64_t first_position = 0;
  std::int64_t sliding_window = 0;  ///< 0: all
  std::int64_t look_ahead = 0;
  /// Scores s, multiplied as the queries are, become softcap * tanh(s / softcap); 0: they stay as they are.
  float softcap = 0.0F;
  /// bias[head * bias_stride + key's position - query's position] is added to the scores, multiplied as they
  /// are; head is the row's number modulo rows_per_position. It is read for every slot of the groups, whether
  /// a row sees it or not. nullptr: nothing is added.
  const float* bias = nullptr;
  std::int64_t bias_stride = 0;
  std::int64_t head_dim = 0;  ///< even
  std::int64_t slots = 0;     ///< of a block
  bool is_int8 = false;
  /// int8: tile_scratch_floats(head_dim) floats.
  float* scratch = nullptr;
  // What the tiles before made, to begin with zeros and begin_row: for each row, with p = 2^(score -
  // greatest),
  float* greatest = nullptr;  ///< [rows]
  float* totals = nullptr;    ///< [rows, kKeyGroup]: parts of the sum of p
  float* sums = nullptr;      ///< [rows, columns(head_dim)]: of p * value
};

/// Keys and values that rows attend to next, tile by tile.
struct KeyTiles {
  /// Tiles of kTileGroups, and behind them groups that are only fetched meanwhile, as far as there are any.
  std::span<const KeyGroup> groups;
  /// The groups that are attended to: the last tile may have fewer than kTileGroups.
  std::int64_t attended = 0;
};

/// AttentionRows::scratch for int8 keys and values.
[[nodiscard]] constexpr std::int64_t tile_scratch_floats(std::int64_t head_dim) {
  return kTileSlots * (head_dim + whole_groups(head_dim));
}

/// AttentionRows::greatest before the first tile. It is finite, so that a row that sees nothing of a tile
/// stays as it is.
inline constexpr float kNoScore = -1e30F;

/// What a row has of AttentionRows::greatest and totals before the first tile. Its sink is a score,
/// multiplied as the others are, that has no value; kNoScore: there is none.
inline void begin_row(float sink, float* greatest, float* totals) {
  std::fill_n(totals, kKeyGroup, 0.0F);
  *greatest = std::max(sink, kNoScore);
  if (sink > kNoScore) totals[0] = 1.0F;
}

}  // namespace adaptrt
