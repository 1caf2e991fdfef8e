#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/dtype.h"

namespace adaptrt {

// Layout of keys and values for attention, and the interface of its kernels. The slots of a KV block form
// groups of kKeyGroup slots, for every instruction set. A block has whole groups, so its last slots may have
// no tokens. With ki = k_interleave(dtype), and columns(head_dim) = head_dim rounded up to a multiple of 16:
//
//   keys:   [head_dim / ki][slots][ki]           a panel of the matrix [slots, head_dim]
//   values: [slots / ki][columns(head_dim)][ki]  a panel of the matrix [columns(head_dim), slots]
//
// int8 keys and values have ki = 2 for every type, and one float32 scale per slot.
inline constexpr std::int64_t kKeyGroup = 16;
/// Number of groups in a tile, the unit of the online softmax.
inline constexpr std::int64_t kTileGroups = 4;
inline constexpr std::int64_t kTileSlots = kKeyGroup * kTileGroups;

/// `size` rounded up to whole groups of 16.
[[nodiscard]] constexpr std::int64_t whole_groups(std::int64_t size) {
  return (size + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
}

/// Up to kKeyGroup consecutive tokens of a sequence in neighbouring slots of a block.
struct KeyGroup {
  const std::byte* keys = nullptr;    ///< first slot
  const std::byte* values = nullptr;  ///< first slot
  const float* key_scales = nullptr;  ///< int8: [kKeyGroup]
  const float* value_scales = nullptr;
  std::int64_t first_position = 0;  ///< position of the first slot in the sequence
  std::int64_t count = 0;           ///< number of slots with tokens
};

/// Queries that share a key-value head, and the state of their online softmax.
///
/// Row r belongs to position first_position + r / rows_per_position. A row attends to the keys from
/// sliding_window - 1 positions before its own (from first_key on, if sliding_window is 0) to `look_ahead`
/// positions after it. Other slots may have any keys, but their values must be finite. A row's results depend
/// only on its position and on the keys and values that it attends to, provided that a sequence is always
/// split into the same tiles.
struct AttentionRows {
  /// [rows, head_dim], in activation_dtype, multiplied by the score scale and by log2(e).
  const void* queries = nullptr;
  std::int64_t rows = 0;
  std::int64_t rows_per_position = 1;
  std::int64_t first_position = 0;
  std::int64_t sliding_window = 0;  ///< 0: no window
  std::int64_t first_key = 0;  ///< position of the first key that rows attend to without a sliding window
  std::int64_t look_ahead = 0;
  /// Scores s, scaled like the queries, become softcap * tanh(s / softcap); 0: no softcap.
  float softcap = 0.0F;
  /// bias[head * bias_stride + key's position - query's position] is added to the scores, and must be scaled
  /// like them. `head` is the row's number modulo rows_per_position. The bias is read for every slot of the
  /// groups, including masked ones. nullptr: no bias.
  const float* bias = nullptr;
  std::int64_t bias_stride = 0;
  std::int64_t head_dim = 0;  ///< even
  std::int64_t slots = 0;     ///< slots of a block
  bool is_int8 = false;
  /// int8: tile_scratch_floats(head_dim) floats.
  float* scratch = nullptr;
  // State of the online softmax, starting with zeros and begin_row(). With p = 2^(score - row_max), for each
  // row:
  float* row_max = nullptr;      ///< [rows]
  float* row_sum = nullptr;      ///< [rows, kKeyGroup]: partial sums of p
  float* accumulator = nullptr;  ///< [rows, columns(head_dim)]: sums of p * value
};

/// Keys and values that the rows attend to next, tile by tile.
struct KeyTiles {
  /// Tiles of kTileGroups groups. Groups after the attended ones, if any, are only prefetched.
  std::span<const KeyGroup> groups;
  /// Number of groups to attend to; the last tile may have fewer than kTileGroups.
  std::int64_t attended = 0;
};

/// Size of AttentionRows::scratch for int8 keys and values.
[[nodiscard]] constexpr std::int64_t tile_scratch_floats(std::int64_t head_dim) {
  return kTileSlots * (head_dim + whole_groups(head_dim));
}

/// AttentionRows::row_max before the first tile. It is finite, so that a fully masked tile does not change a
/// row.
inline constexpr float kNoScore = -1e30F;

/// Initialises a row of AttentionRows::row_max and row_sum. `sink` is the score of an attention sink, scaled
/// like the other scores, which has no value; kNoScore for no sink.
inline void begin_row(float sink, float* row_max, float* row_sum) {
  std::fill_n(row_sum, kKeyGroup, 0.0F);
  *row_max = std::max(sink, kNoScore);
  if (sink > kNoScore) row_sum[0] = 1.0F;
}

}  // namespace adaptrt
