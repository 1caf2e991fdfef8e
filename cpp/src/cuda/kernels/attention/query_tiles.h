#pragma once

#include <cstdint>

#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Some rows of a sequence with more than one token. Row r of a sequence is query head r % group of the KV
/// head's group, for token r / group.
struct QueryTile {
  std::int32_t sequence;
  std::int32_t kv_head;
  std::int32_t first_token;  // of the sequence
  std::int32_t first_row;    // of the tile
  std::int32_t num_rows;     // 0 or less: nothing to do
  std::int32_t first_position;
  std::int32_t last_position;

  /// The token of a row of the tile.
  [[nodiscard]] __device__ std::int32_t token_of(const AttentionStep& step, std::int32_t row) const {
    return first_token + step.group.quotient(first_row + row);
  }

  /// The position of a row of the tile; -1 if there is no such row or its token is padding.
  [[nodiscard]] __device__ std::int32_t position_of(const AttentionStep& step, std::int32_t row) const {
    if (row >= num_rows) return -1;
    const std::int32_t position = step.positions[token_of(step, row)];
    return block_of(step, sequence, position) < 0 ? -1 : position;
  }

  /// The query head of a row of the tile.
  [[nodiscard]] __device__ std::int32_t head_of(const AttentionStep& step, std::int32_t row) const {
    return kv_head * step.group.value() + step.group.remainder(first_row + row);
  }

  /// Element offset of a row in the queries and in the result.
  [[nodiscard]] __device__ std::int64_t row_offset(const AttentionStep& step, std::int32_t row) const {
    return (static_cast<std::int64_t>(token_of(step, row)) * step.num_heads + head_of(step, row)) *
           step.head_dim;
  }
};

/// Number of the first tile of kRows rows of sequence s, which begins at token `first_token`. Let a and b be
/// the first rows of s and of the next sequence, counted over the step. Then s has ceil((b - a) / kRows) <=
/// floor(b / kRows) - floor(a / kRows) + 1 tiles. So every sequence has its own numbers without counting the
/// other sequences' tiles. Some numbers have no tile.
template <int kRows>
__host__ __device__ inline std::int32_t first_tile_of(std::int32_t s, std::int32_t first_token,
                                                      std::int32_t group) {
  return static_cast<std::int32_t>(static_cast<std::int64_t>(first_token) * group / kRows) + s;
}

/// Number of tiles of a KV head in a step, including empty ones.
template <int kRows>
[[nodiscard]] std::int32_t count_tiles(const AttentionStep& step) {
  return first_tile_of<kRows>(step.sequences, step.tokens, step.group.value());
}

/// The tile of this block. The last tiles come first, because the end of a sequence sees the most keys.
/// `found` is in shared memory and must be unused.
template <int kRows>
__device__ QueryTile find_query_tile(const AttentionStep& step, std::int32_t* found) {
  const std::int32_t group = step.group.value();
  const auto index = static_cast<std::int32_t>(gridDim.x - 1 - blockIdx.x);
  QueryTile tile{};
  tile.kv_head = index % step.num_kv_heads;
  const std::int32_t number = index / step.num_kv_heads;
  tile.sequence = find_sequence(step, number, found, [&](std::int32_t s) {
    return first_tile_of<kRows>(s, step.sequence_offsets[s], group);
  });
  if (tile.sequence < 0) return tile;
  tile.first_token = step.sequence_offsets[tile.sequence];
  const std::int32_t tokens = step.sequence_offsets[tile.sequence + 1] - tile.first_token;
  if (tokens <= 1) return tile;
  tile.first_row = (number - first_tile_of<kRows>(tile.sequence, tile.first_token, group)) * kRows;
  const std::int32_t rows_left = tokens * group - tile.first_row;
  if (rows_left <= 0) return tile;
  tile.num_rows = rows_left < kRows ? rows_left : kRows;
  tile.first_position = step.positions[tile.token_of(step, 0)];
  tile.last_position = step.positions[tile.token_of(step, tile.num_rows - 1)];
  return tile;
}

}  // namespace adaptrt::cuda
