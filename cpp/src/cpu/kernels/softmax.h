#pragma once

// Online softmax of a tile's scores, for attention.h. Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "adaptrt/cpu/attention_tile.h"
#include "exponential.h"
#include "gemm.h"

namespace adaptrt {
namespace {

inline constexpr std::int64_t kVectorsPerGroup = kKeyGroup / Simd::kLanes;
inline constexpr std::int64_t kVectorsPerTile = kTileSlots / Simd::kLanes;

/// Rows and one of the tiles that they attend to.
struct AttentionTile : AttentionRows {
  AttentionTile(const AttentionRows& attending, const KeyTiles& tiles, std::int64_t first_group)
      : AttentionRows(attending),
        groups(tiles.groups.data() + first_group),
        num_groups(std::min(kTileGroups, tiles.attended - first_group)) {}

  const KeyGroup* groups;
  std::int64_t num_groups;
};

/// row_max is raised only when a score exceeds it by more than this. So the accumulators of a row are seldom
/// rescaled, and its probabilities are at most 2^kHeadroom.
inline constexpr float kHeadroom = 8.0F;

/// Rows that are computed together.
template <class Weights, int kRows = kTileRows>
struct RowBlock {
  using A = typename Weights::A;
  alignas(64) float scores[kRows][kTileSlots];
  alignas(64) A probabilities[kRows][kTileSlots];
  std::int64_t row = 0;  // number of the first row
  std::int64_t rows = 0;
  std::int64_t first_position = 0;
  std::int64_t last_position = 0;
  std::int64_t num_groups = 0;  // number of groups that at least one row attends to
};

/// Sets scores to -infinity if the row does not attend to the slot. Skips groups that all rows attend to
/// entirely.
template <class Block>
inline void apply_mask(const AttentionTile& tile, Block* block) {
  const Simd::Vec hidden = Simd::set(-std::numeric_limits<float>::infinity());
  const auto first_visible = [&](std::int64_t position) {
    return tile.sliding_window == 0 ? tile.first_key : position + 1 - tile.sliding_window;
  };
  for (std::int64_t index = 0; index < block->num_groups; ++index) {
    const KeyGroup& group = tile.groups[index];
    if (group.count == kKeyGroup &&
        group.first_position + kKeyGroup <= block->first_position + tile.look_ahead + 1 &&
        group.first_position >= first_visible(block->last_position)) {
      continue;
    }
    for (std::int64_t r = 0; r < block->rows; ++r) {
      const std::int64_t position = tile.first_position + (block->row + r) / tile.rows_per_position;
      const std::int64_t begin = first_visible(position) - group.first_position;
      const std::int64_t end = std::min(position + tile.look_ahead + 1 - group.first_position, group.count);
      for (std::int64_t lane = 0; lane < kKeyGroup; lane += Simd::kLanes) {
        float* at = block->scores[r] + index * kKeyGroup + lane;
        Simd::store(at, Simd::select_lanes(std::clamp<std::int64_t>(begin - lane, 0, Simd::kLanes),
                                           std::clamp<std::int64_t>(end - lane, 0, Simd::kLanes),
                                           Simd::load(at), hidden));
      }
    }
  }
}

/// Raises row_max of a row, and rescales its earlier sums.
inline void raise_row_max(const AttentionTile& tile, std::int64_t row, float row_max) {
  if (tile.row_max[row] == kNoScore) {
    tile.row_max[row] = row_max;  // the earlier sums are zeros
    return;
  }
  const Simd::Vec factor = exp2_of<false>(Simd::sub(Simd::set(tile.row_max[row]), Simd::set(row_max)));
  const auto scale = [&](float* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += Simd::kLanes)
      Simd::store(x + i, Simd::mul(Simd::load(x + i), factor));
  };
  const std::int64_t columns = whole_groups(tile.head_dim);
  scale(tile.row_sum + row * kKeyGroup, kKeyGroup);
  scale(tile.accumulator + row * columns, columns);
  tile.row_max[row] = row_max;
}

inline void store_probabilities(float* to, Simd::Vec first, Simd::Vec second) {
  Simd::store(to, first);
  Simd::store(to + Simd::kLanes, second);
}
inline void store_probabilities(std::uint16_t* to, Simd::Vec first, Simd::Vec second) {
  Simd::store_bfloat16(reinterpret_cast<std::byte*>(to), first, second);
}

/// Multiplies the scores of int8 keys by the keys' scales.
template <class Block>
inline void scale_scores(const AttentionTile& tile, Block* block) {
  for (std::int64_t v = 0; v < block->num_groups * kVectorsPerGroup; ++v) {
    const KeyGroup& group = tile.groups[v / kVectorsPerGroup];
    const Simd::Vec scales = Simd::load(group.key_scales + v % kVectorsPerGroup * Simd::kLanes);
    for (std::int64_t r = 0; r < block->rows; ++r) {
      float* at = block->scores[r] + v * Simd::kLanes;
      Simd::store(at, Simd::mul(Simd::load(at), scales));
    }
  }
}

/// Bounds the scores by AttentionRows::softcap.
template <class Block>
inline void cap_scores(const AttentionTile& tile, Block* block) {
  const Simd::Vec cap = Simd::set(tile.softcap);
  const Simd::Vec two_by_cap = Simd::set(2.0F / tile.softcap);
  for (std::int64_t r = 0; r < block->rows; ++r) {
    for (std::int64_t v = 0; v < block->num_groups * kVectorsPerGroup; ++v) {
      float* at = block->scores[r] + v * Simd::kLanes;
      Simd::store(at, softcap_of(Simd::load(at), cap, two_by_cap));
    }
  }
}

/// Adds AttentionRows::bias.
template <class Block>
inline void add_bias(const AttentionTile& tile, Block* block) {
  for (std::int64_t r = 0; r < block->rows; ++r) {
    const std::int64_t row = block->row + r;
    const std::int64_t position = tile.first_position + row / tile.rows_per_position;
    const float* bias = tile.bias + row % tile.rows_per_position * tile.bias_stride - position;
    for (std::int64_t v = 0; v < block->num_groups * kVectorsPerGroup; ++v) {
      const KeyGroup& group = tile.groups[v / kVectorsPerGroup];
      float* at = block->scores[r] + v * Simd::kLanes;
      const float* of_keys = bias + group.first_position + v % kVectorsPerGroup * Simd::kLanes;
      Simd::store(at, Simd::add(Simd::load(at), Simd::load(of_keys)));
    }
  }
}

/// take_scores for `vectors` vectors. The compiler knows their number if Count is a std::integral_constant.
template <bool kScaled, class Count, class Block>
inline void take_vectors(const AttentionTile& tile, Count vectors, Block* block) {
  constexpr bool kToBFloat16 = std::is_same_v<typename Block::A, std::uint16_t>;
  for (std::int64_t r = 0; r < block->rows; ++r) {
    const float* scores = block->scores[r];
    const std::int64_t row = block->row + r;
    Simd::Vec row_max = Simd::load(scores);
    for (std::int64_t v = 1; v < vectors; ++v) {
      row_max = Simd::max(row_max, Simd::load(scores + v * Simd::kLanes));
    }
    if (Simd::any_above(row_max, Simd::set(tile.row_max[row] + kHeadroom))) {
      raise_row_max(tile, row, Simd::greatest(row_max));
    }
  }
  for (std::int64_t r = 0; r < block->rows; ++r) {
    const float* scores = block->scores[r];
    const Simd::Vec row_max = Simd::set(tile.row_max[block->row + r]);
    float* row_sum = tile.row_sum + (block->row + r) * kKeyGroup;
    Simd::Vec total = Simd::load(row_sum);
    const auto probability = [&](std::int64_t v) {
      Simd::Vec p = exp2_of<kToBFloat16>(Simd::sub(Simd::load(scores + v * Simd::kLanes), row_max));
      total = Simd::add(total, p);
      if constexpr (kScaled) {
        const KeyGroup& group = tile.groups[v / kVectorsPerGroup];
        p = Simd::mul(p, Simd::load(group.value_scales + v % kVectorsPerGroup * Simd::kLanes));
      }
      return p;
    };
    typename Block::A* out = block->probabilities[r];
    for (std::int64_t v = 0; v + 1 < vectors; v += 2) {
      const Simd::Vec first = probability(v);
      store_probabilities(out + v * Simd::kLanes, first, probability(v + 1));
    }
    if (vectors % 2 != 0) {
      const std::int64_t last = vectors - 1;
      store_probabilities(out + last * Simd::kLanes, probability(last), Simd::zero());
    }
    Simd::store(row_sum, total);
  }
}

/// Scales, caps, biases and masks the scores of a block of rows.
template <bool kScaled, class Block>
inline void finish_scores(const AttentionTile& tile, Block* block) {
  if constexpr (kScaled) scale_scores(tile, block);
  if (tile.softcap > 0.0F) cap_scores(tile, block);
  if (tile.bias != nullptr) add_bias(tile, block);
  apply_mask(tile, block);
}

/// Turns the scores of a block of rows into probabilities, and updates row_sum and row_max.
template <bool kScaled, class Block>
inline void take_scores(const AttentionTile& tile, Block* block) {
  finish_scores<kScaled>(tile, block);
  if (block->num_groups == kTileGroups) {
    take_vectors<kScaled>(tile, std::integral_constant<std::int64_t, kVectorsPerTile>(), block);
  } else {
    take_vectors<kScaled>(tile, block->num_groups * kVectorsPerGroup, block);
  }
}

}  // namespace
}  // namespace adaptrt
