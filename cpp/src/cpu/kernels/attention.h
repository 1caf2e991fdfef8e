#pragma once

// Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "adaptrt/cpu/attention_tile.h"
#include "elementwise.h"
#include "gemm.h"
#include "quantized_weights.h"
#include "softmax.h"

namespace adaptrt {
namespace {

/// A tile, and the tile to prefetch while this one is attended to.
struct FetchingTile : AttentionTile {
  FetchingTile(const AttentionRows& attending, const KeyTiles& tiles, std::int64_t first_group)
      : AttentionTile(attending, tiles, first_group) {
    const std::int64_t remaining = std::ssize(tiles.groups) - (first_group + kTileGroups);
    const std::int64_t count = std::clamp<std::int64_t>(remaining, 0, kTileGroups);
    std::copy_n(groups + kTileGroups, count, next.begin());
  }

  /// nullptr for missing groups.
  std::array<KeyGroup, kTileGroups> next;
};

/// Addresses of each vector of a tile's slots in the keys, and in the keys to prefetch.
struct KeyColumns {
  const std::byte* at[kVectorsPerTile] = {};
  const std::byte* next[kVectorsPerTile] = {};
};

template <class Weights>
KeyColumns columns_of(const FetchingTile& tile) {
  KeyColumns columns;
  for (std::int64_t v = 0; v < tile.num_groups * kVectorsPerGroup; ++v) {
    const std::int64_t group = v / kVectorsPerGroup;
    const std::int64_t offset = v % kVectorsPerGroup * Simd::kLanes * Weights::kColumnBytes;
    columns.at[v] = tile.groups[group].keys + offset;
    columns.next[v] = tile.next[static_cast<std::size_t>(group)].keys + offset;
  }
  return columns;
}

/// out[kRows][vector] = queries * keys, for kVectors vectors of slots starting with `first`.
template <class Weights, int kRows, int kVectors>
void score_tile(const AttentionTile& tile, std::int64_t row, std::int64_t key_bytes,
                const KeyColumns& columns, std::int64_t first, float* out) {
  using A = typename Weights::A;
  const A* queries = static_cast<const A*>(tile.queries) + row * tile.head_dim;
  const std::int64_t stride = tile.head_dim;
  Simd::Vec sums[kRows][kVectors];
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::zero();
  }
  std::int64_t offset = 0;
  for (std::int64_t k = 0; k < stride; k += Weights::kInterleave, offset += key_bytes) {
    typename Weights::B keys[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      keys[v] = Weights::load(columns.at[first + v] + offset);
      __builtin_prefetch(columns.next[first + v] + offset, 0, 3);
    }
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto query = Weights::broadcast(queries + r * stride + k);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Weights::multiply_add(query, keys[v], sums[r][v]);
    }
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) Simd::store(out + r * kTileSlots + v * Simd::kLanes, sums[r][v]);
  }
}

/// out[kRows][vector] += probabilities * values, for kVectors vectors of columns from `column` on.
template <class Weights, int kRows, int kVectors>
void weigh_tile(const FetchingTile& tile, const RowBlock<Weights>& block, std::int64_t column, float* out) {
  const std::int64_t stride = whole_groups(tile.head_dim);
  const std::int64_t row_bytes = stride * Weights::kColumnBytes;
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Weights::kColumnBytes;
  Simd::Vec sums[kRows][kVectors];
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::load(out + r * stride + v * Simd::kLanes);
  }
  for (std::int64_t group = 0; group < block.num_groups; ++group) {
    const std::byte* values = tile.groups[group].values + column * Weights::kColumnBytes;
    const std::byte* next =
        tile.next[static_cast<std::size_t>(group)].values + column * Weights::kColumnBytes;
    const auto* probabilities = &block.probabilities[0][group * kKeyGroup];
    for (std::int64_t k = 0; k < kKeyGroup; k += Weights::kInterleave) {
      typename Weights::B columns[kVectors];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = Weights::load(values + v * kVectorBytes);
        __builtin_prefetch(next + v * kVectorBytes, 0, 3);
      }
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto p = Weights::broadcast(probabilities + r * kTileSlots + k);
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Weights::multiply_add(p, columns[v], sums[r][v]);
      }
      values += row_bytes;
      next += row_bytes;
    }
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) Simd::store(out + r * stride + v * Simd::kLanes, sums[r][v]);
  }
}

/// Calls body(std::integral_constant<int, n>) for n from 1 to kMost.
template <int kMost, class Body>
inline void with_constant(std::int64_t n, const Body& body) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_constant<kMost - 1>(n, body);
  }
  body(std::integral_constant<int, kMost>());
}

/// Number of groups that begin at or before a position.
inline std::int64_t groups_until(const AttentionTile& tile, std::int64_t position) {
  std::int64_t groups = tile.num_groups;
  while (groups > 0 && tile.groups[groups - 1].first_position > position) --groups;
  return groups;
}

template <class Weights, int kRows>
void score_groups(const AttentionTile& tile, const KeyColumns& columns, RowBlock<Weights>* block) {
  const std::int64_t key_bytes = tile.slots * Weights::kColumnBytes;
  const std::int64_t vectors = block->num_groups * kVectorsPerGroup;
  for (std::int64_t first = 0; first < vectors; first += kTileVectors) {
    with_constant<kTileVectors>(std::min<std::int64_t>(kTileVectors, vectors - first), [&](auto constant) {
      score_tile<Weights, kRows, constant()>(tile, block->row, key_bytes, columns, first,
                                             &block->scores[0][first * Simd::kLanes]);
    });
  }
}

template <class Weights, int kRows>
void weigh_columns(const FetchingTile& tile, const RowBlock<Weights>& block) {
  const std::int64_t columns = whole_groups(tile.head_dim);
  for (std::int64_t column = 0; column < columns; column += kTileVectors * Simd::kLanes) {
    const std::int64_t left = (columns - column) / Simd::kLanes;
    with_constant<kTileVectors>(std::min<std::int64_t>(kTileVectors, left), [&](auto constant) {
      weigh_tile<Weights, kRows, constant()>(tile, block, column,
                                             tile.accumulator + block.row * columns + column);
    });
  }
}

/// Two blocks of rows alternate: the scores of one are multiplied while those of the block before become
/// probabilities. Probabilities need long chains of dependent instructions, which would otherwise leave the
/// multipliers idle.
template <class Weights, bool kScaled>
void attend_stored(const FetchingTile& tile) {
  RowBlock<Weights> blocks[2];
  const KeyColumns columns = columns_of<Weights>(tile);
  const std::int64_t num_blocks = (tile.rows + kTileRows - 1) / kTileRows;
  const auto begin_block = [&](std::int64_t index, std::int64_t row) {
    RowBlock<Weights>& block = blocks[index % 2];
    block.row = row;
    block.rows = rows_of_tile(tile.rows - row, num_blocks - index);
    block.first_position = tile.first_position + row / tile.rows_per_position;
    block.last_position = tile.first_position + (row + block.rows - 1) / tile.rows_per_position;
    block.num_groups = groups_until(tile, block.last_position + tile.look_ahead);
    with_constant<kTileRows>(block.rows,
                             [&](auto rows) { score_groups<Weights, rows()>(tile, columns, &block); });
  };
  begin_block(0, 0);
  for (std::int64_t index = 0; index < num_blocks; ++index) {
    RowBlock<Weights>& block = blocks[index % 2];
    if (block.num_groups > 0) take_scores<kScaled>(tile, &block);
    if (index + 1 < num_blocks) begin_block(index + 1, block.row + block.rows);
    with_constant<kTileRows>(block.rows, [&](auto rows) { weigh_columns<Weights, rows()>(tile, block); });
  }
}

/// Writes pairs of int8 in the panel layout of Weights.
template <class Weights>
inline void store_pairs(Simd::Pair pair, std::byte* to, std::int64_t row_bytes) {
  if constexpr (Weights::kInterleave == 2) {
    Simd::store_words(to, Simd::pack_bfloat16(pair.even, pair.odd), Simd::kLanes);
  } else {
    Simd::store(reinterpret_cast<float*>(to), pair.even);
    Simd::store(reinterpret_cast<float*>(to + row_bytes), pair.odd);
  }
}

/// The int8 keys and values of a tile, widened in its scratch.
template <class Weights>
class WidenedGroups {
 public:
  explicit WidenedGroups(const FetchingTile& tile) {
    constexpr std::int64_t kPair = 2;
    // Bytes of a slot or column in a line of the widened panels.
    constexpr std::int64_t kStep = Weights::kColumnBytes;
    constexpr std::int64_t kRowsOfPair = kPair / Weights::kInterleave;
    const std::int64_t columns = whole_groups(tile.head_dim);
    auto* keys = reinterpret_cast<std::byte*>(tile.scratch);
    std::byte* values = keys + tile.head_dim * kTileSlots * static_cast<std::int64_t>(sizeof(float));
    for (std::int64_t index = 0; index < tile.num_groups; ++index) {
      const KeyGroup& group = tile.groups[index];
      const KeyGroup& next = tile.next[static_cast<std::size_t>(index)];
      std::byte* to = keys + index * kKeyGroup * kStep;
      KeyGroup& made = groups_[static_cast<std::size_t>(index)];
      made = group;
      made.keys = to;
      for (std::int64_t k = 0; k < tile.head_dim; k += kPair) {
        const std::int64_t from = k * tile.slots;
        __builtin_prefetch(next.keys + from, 0, 3);
        for (std::int64_t lane = 0; lane < kKeyGroup; lane += Simd::kLanes) {
          store_pairs<Weights>(Simd::load_int8_pairs(group.keys + from + lane * kPair, Simd::kLanes),
                               to + lane * kStep, kTileSlots * kStep);
        }
        to += kRowsOfPair * kTileSlots * kStep;
      }
      to = values + index * kKeyGroup / Weights::kInterleave * columns * kStep;
      made.values = to;
      for (std::int64_t k = 0; k < kKeyGroup; k += kPair) {
        const std::int64_t from = k * columns;
        for (std::int64_t column = 0; column < columns; column += Simd::kLanes) {
          if (column * kPair % kCacheLine == 0) {
            __builtin_prefetch(next.values + from + column * kPair, 0, 3);
          }
          store_pairs<Weights>(Simd::load_int8_pairs(group.values + from + column * kPair, Simd::kLanes),
                               to + column * kStep, columns * kStep);
        }
        to += kRowsOfPair * columns * kStep;
      }
    }
  }

  [[nodiscard]] KeyTiles tiles(std::int64_t num_groups) const { return {groups_, num_groups}; }

 private:
  std::array<KeyGroup, kTileGroups> groups_;
};

/// int8 keys and values that are widened in registers and multiplied there by bfloat16.
struct StoredInt8 : Int8BFloat16 {
  static auto load(const std::byte* from) { return decode<0>(Int8BFloat16::load(from, Simd::kLanes)); }
};

template <class Weights>
void attend_int8(const AttentionRows& rows, const FetchingTile& tile) {
  if constexpr (Weights::kInterleave == 2) {
    // A single block of rows would read the widened values from memory only once.
    if (tile.rows <= kTileRows) {
      attend_stored<StoredInt8, true>(tile);
      return;
    }
  }
  using Widened = std::conditional_t<Weights::kInterleave == 2, Weights, Float32Weights>;
  const WidenedGroups<Widened> widened(tile);
  AttentionRows of_scratch = rows;
  of_scratch.slots = kTileSlots;
  attend_stored<Widened, true>({of_scratch, widened.tiles(tile.num_groups), 0});
}

template <class Weights>
void attend(const AttentionRows& rows, const KeyTiles& tiles) {
  for (std::int64_t first = 0; first < tiles.attended; first += kTileGroups) {
    const FetchingTile tile(rows, tiles, first);
    if (tile.is_int8) {
      attend_int8<Weights>(rows, tile);
    } else {
      attend_stored<Weights, false>(tile);
    }
  }
}

inline void finish_attention(const float* accumulator, const float* row_sum, std::int64_t n, std::byte* out,
                             DType out_type) {
  const Simd::Vec factor = Simd::set(1.0F / Simd::sum(Simd::load(row_sum)));
  with_store(out, out_type, [&](auto store) {
    for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
      // Adding masked slots changes only the sign of a zero sum; + 0 removes that sign.
      store(i, Simd::add(Simd::mul(Simd::load(accumulator + i, lanes), factor), Simd::zero()), lanes);
    });
  });
}

}  // namespace
}  // namespace adaptrt
