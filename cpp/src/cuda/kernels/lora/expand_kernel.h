#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/lora/step.h"
#include "cuda/kernels/lora/token_tile.h"
#include "cuda/kernels/lora/vectors.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::lora {

/// y = round((base + shrunk B^T) * magnitude + shift), for all parts.
///
/// Grid: x token tiles (max_token_tiles), y blocks of kBlockColumns columns of each part. Each warp computes
/// kWarpColumns columns, for 32 tokens at a time (16 if there are no more). Tokens are the rows of the mma.
/// All data goes directly between global memory and registers: rows of B and of shrunk are short and
/// adjacent, and base and y are accessed once. Each sum adds the rank's elements in order.
template <typename T>
class Expand {
 public:
  struct Parameters {
    Step step;
    const void* base;  ///< [tokens, out]
    void* y;           ///< [tokens, out]
    int out;
    bool dora;
  };

  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kWarpColumns = 32;
  static constexpr int kBlockColumns = kThreads / kWarpSize * kWarpColumns;
  static constexpr std::size_t kSharedBytes = sizeof(TileSearch);

  /// Blocks of a part, for computing the grid on the host.
  static int column_blocks(int out) { return (out + kBlockColumns - 1) / kBlockColumns; }

  static __device__ void run(const Parameters& p) {
    allow_next_kernel();
    auto& search = *reinterpret_cast<TileSearch*>(shared_memory());
    const TokenTile tile = find_token_tile(p.step, static_cast<int>(blockIdx.x), search);
    const Columns columns = find_columns(p.step, static_cast<int>(blockIdx.y), kBlockColumns);
    const Update update = update_of(p.step, tile, columns.part);
    wait_for_previous_kernel();
    if (tile.count == 0) return;
    const int start = p.step.parts[columns.part].start;
    const std::int64_t offset = static_cast<std::int64_t>(tile.first) * p.out + start;
    const Work work{.base = static_cast<const T*>(p.base) + offset,
                    .y = static_cast<T*>(p.y) + offset,
                    .shrunk = shrunk_row<T>(p.step, columns.part, tile.first),
                    .b = static_cast<const T*>(update.b),
                    .magnitude = p.dora ? update.magnitude : nullptr,
                    .shift = update.shift,
                    .rank = update.rank,
                    .tokens = tile.count,
                    .width = p.step.parts[columns.part].out,
                    .stride = p.out,
                    .shrunk_stride = p.step.shrunk_stride};
    const bool rows_are_of_vectors = rows_are_aligned(p.base, p.out) && rows_are_aligned(p.y, p.out) &&
                                     start % kVector == 0 && work.width % kVector == 0;
    if (update.rank == 0) {
      if (rows_are_of_vectors) {
        copy_base<Rows::kOfVectors>(work, columns.first);
      } else {
        copy_base<Rows::kAnyhow>(work, columns.first);
      }
      return;
    }
    const int column = columns.first + static_cast<int>(threadIdx.x) / kWarpSize * kWarpColumns;
    if (column >= work.width) return;
    if (!rows_are_of_vectors) {
      expand<1, Rows::kAnyhow, Rows::kAnyhow>(work, column);
    } else if (!rows_are_aligned(update.b, update.rank)) {
      expand<1, Rows::kOfVectors, Rows::kAnyhow>(work, column);
    } else if (tile.count <= 16) {
      expand<1, Rows::kOfVectors, Rows::kOfVectors>(work, column);
    } else {
      expand<2, Rows::kOfVectors, Rows::kOfVectors>(work, column);
    }
  }

 private:
  /// A block's work and its adapter. Rows are the tile's, columns the part's.
  struct Work {
    const T* base;
    T* y;
    const T* shrunk;
    const T* b;
    const float* magnitude;
    const float* shift;
    int rank;
    int tokens;
    int width;
    int stride;
    int shrunk_stride;
  };

  template <Rows kRows>
  static __device__ void copy_base(const Work& work, int first_column) {
    if (work.base == work.y) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int column = first_column + lane * kVector;
    for (int token = static_cast<int>(threadIdx.x) / kWarpSize; token < work.tokens;
         token += kThreads / kWarpSize) {
      const std::int64_t row = static_cast<std::int64_t>(token) * work.stride;
      store_vector<kRows>(work.y + row, column, work.width,
                          load_own_vector<kRows>(work.base + row, column, work.width));
    }
  }

  template <int kRowTiles, Rows kRows, Rows kRowsOfB>
  static __device__ void expand(const Work& work, int first_column) {
    for (int token = 0; token < work.tokens; token += 16 * kRowTiles) {
      expand_tokens<kRowTiles, kRows, kRowsOfB>(work, first_column, token);
    }
  }

  /// Computes 16 kRowTiles tokens from `first_token` on, and the warp's columns from `first_column` on.
  /// Column c of the j-th mma is column 8 (c / 2) + 2 j + c % 2 here, so that a thread holds sums of eight
  /// adjacent columns.
  template <int kRowTiles, Rows kRows, Rows kRowsOfB>
  static __device__ void expand_tokens(const Work& work, int first_column, int first_token) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int group = lane / 4;
    const int vector = lane % 4 * kVector;
    const int column = first_column + vector;
    Vector16 base[kRowTiles][2];
    ADAPTRT_UNROLL
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int token = first_token + group + 8 * i;
      base[i / 2][i % 2] = load_own_vector<kRows>(work.base + static_cast<std::int64_t>(token) * work.stride,
                                                  column, token < work.tokens ? work.width : 0);
    }
    float sums[kRowTiles][4][4] = {};
    // This thread's column in the first mma; in the j-th mma it is 2 j columns further.
    const int b_column = first_column + group / 2 * 8 + group % 2;
    const T* b_row = work.b + static_cast<std::int64_t>(b_column) * work.rank;
    const T* shrunk_row = work.shrunk + static_cast<std::int64_t>(first_token + group) * work.shrunk_stride;
    // Unrolled, it would need too many registers.
    ADAPTRT_NO_UNROLL
    for (int k = vector; k < work.rank + vector; k += kColumnsOfMultiply) {
      Vector16 b[4];
      ADAPTRT_UNROLL
      for (int j = 0; j < 4; ++j) {
        b[j] = load_vector<kRowsOfB>(b_row + 2 * j * work.rank, k,
                                     b_column + 2 * j < work.width ? work.rank : 0);
      }
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        Vector16 shrunk[2];
        ADAPTRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int token = 16 * i + 8 * half;
          const bool exists = first_token + group + token < work.tokens;
          shrunk[half] = load_own_vector<Rows::kOfVectors>(shrunk_row + token * work.shrunk_stride, k,
                                                           exists ? work.rank : 0);
        }
        ADAPTRT_UNROLL
        for (int j = 0; j < 4; ++j) multiply_32<T>(sums[i][j], shrunk[0], shrunk[1], b[j]);
      }
    }
    const RowVectors vectors(work.magnitude, work.shift, column, work.width);
    ADAPTRT_UNROLL
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int token = first_token + group + 8 * i;
      Vector16 result;
      ADAPTRT_UNROLL
      for (int j = 0; j < 4; ++j) {
        const FloatPair of_base = unpack_pair<T>(base[i / 2][i % 2].words[j]);
        const float* sum = sums[i / 2][j] + i % 2 * 2;
        result.words[j] = pack_pair<T>(vectors.apply(of_base.first + sum[0], 2 * j),
                                       vectors.apply(of_base.second + sum[1], 2 * j + 1));
      }
      store_vector<kRows>(work.y + static_cast<std::int64_t>(token) * work.stride, column,
                          token < work.tokens ? work.width : 0, result);
    }
  }
};

}  // namespace adaptrt::cuda::lora
