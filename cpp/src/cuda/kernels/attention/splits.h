#pragma once

#include <cstdint>

#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Keys of a tile. Tiles begin at multiples of it. The order of all sums follows from it, so prefills and
/// decodes use the same tiles.
template <int kHeadDim>
inline constexpr int kTileKeys = kHeadDim < 128    ? 64
                                 : kHeadDim == 128 ? 48
                                                   : 32;
/// Tiles of the smallest split.
inline constexpr std::int32_t kSplitTiles = 8;
/// Maximum splits of a token's visible keys, if the first one begins at a multiple of a split.
inline constexpr std::int32_t kMostSplits = 16;

/// Keys of a token's splits, which begin at multiples of it: kTile * kSplitTiles * 2^n, with the least n that
/// gives at most kMostSplits splits. It depends on the token's position only, not on its step.
template <int kTile>
__host__ __device__ inline std::int32_t split_keys(std::int32_t visible_keys) {
  std::int32_t keys = kTile * kSplitTiles;
  while (visible_keys > static_cast<std::int64_t>(keys) * kMostSplits) keys *= 2;
  return keys;
}

/// The splits of a token: [first, last], each of `keys` keys.
struct SplitRange {
  std::int32_t keys;
  std::int32_t first;
  std::int32_t last;

  [[nodiscard]] __device__ std::int32_t count() const { return last - first + 1; }
};

template <int kTile>
__device__ inline SplitRange splits_of(const AttentionStep& step, std::int32_t position) {
  const std::int32_t begin = first_visible(step, position);
  const std::int32_t keys = split_keys<kTile>(position + 1 - begin);
  return {keys, begin / keys, position / keys};
}

/// Maximum parts of a sequence whose sums are stored. Parts are splits, whose number is one more with a
/// window that begins within a split, or tiles.
inline constexpr std::int32_t kMostParts = kMostSplits + 1;

/// Distribution of the decodes' keys over blocks. Each part of a sequence that has several stores its sums,
/// relative to its maximum score.
struct Splits {
  std::int32_t count;    // maximum parts per sequence
  std::int32_t lanes;    // blocks that share the parts of a sequence's KV head
  bool separates_tiles;  // tiles of short sequences are parts; there are kMostParts lanes
  float* sums;           // [sequences, num_heads, count, head_dim]; nullptr if count is 1
  float* totals;  // [sequences, num_heads, count, 2]: maximum score in units of log2, sum of the weights
  /// Blocks that have stored their parts: [sequences, blocks of all KV heads]. They are zero before and after
  /// a launch.
  std::uint32_t* counters;
};

/// Index of the first part of a head.
__device__ inline std::int64_t split_index(const AttentionStep& step, const Splits& splits,
                                           std::int32_t sequence, std::int32_t head) {
  return (static_cast<std::int64_t>(sequence) * step.num_heads + head) * splits.count;
}

}  // namespace adaptrt::cuda
