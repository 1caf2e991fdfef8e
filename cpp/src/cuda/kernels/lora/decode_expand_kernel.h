#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/lora/expand_kernel.h"
#include "cuda/kernels/lora/step.h"
#include "cuda/kernels/lora/token_tile.h"
#include "cuda/kernels/lora/vectors.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::lora {

/// Expand for short steps, where loading B takes all the time. The sums have the same order as in Expand, so
/// the bits are the same. Rows of base and y, and each part's rows, are aligned to 16 bytes.
///
/// Grid: x token tiles of up to 16 (max_token_tiles), y blocks of kBlockColumns columns of each part. Each
/// warp computes kWarpColumns columns, 32 at a time. It copies its rows of B to its own ring of stages in
/// shared memory. The first stages are copied before the previous kernel has computed `shrunk`.
template <typename T>
class DecodeExpand {
 public:
  using Parameters = typename Expand<T>::Parameters;

  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = kDecodeBlocksPerMultiprocessor;
  static constexpr int kWarpColumns = 128;
  static constexpr int kBlockColumns = kThreads / kWarpSize * kWarpColumns;

 private:
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kGroupColumns = 32;
  static constexpr int kRingBytes = 4096;

  struct Shared {
    alignas(16) unsigned char rings[kWarps][kRingBytes];
    TileSearch search;
  };

 public:
  static constexpr std::size_t kSharedBytes = sizeof(Shared);

  /// Blocks of a part, for computing the grid on the host.
  static int column_blocks(int out) { return (out + kBlockColumns - 1) / kBlockColumns; }

  static __device__ void run(const Parameters& p) {
    allow_next_kernel();
    const TokenTile tile = find_token_tile(p.step, static_cast<int>(blockIdx.x), shared().search);
    const Columns columns = find_columns(p.step, static_cast<int>(blockIdx.y), kBlockColumns);
    const Update update = update_of(p.step, tile, columns.part);
    const std::int64_t offset =
        static_cast<std::int64_t>(tile.first) * p.out + p.step.parts[columns.part].start;
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
                    .shrunk_stride = p.step.shrunk_stride,
                    .b_is_aligned = rows_are_aligned(update.b, update.rank)};
    const int column = columns.first + static_cast<int>(threadIdx.x) / kWarpSize * kWarpColumns;
    if (column >= work.width || work.tokens == 0) {
      wait_for_previous_kernel();
    } else if (work.rank == 0) {
      wait_for_previous_kernel();
      copy_base(work, column);
    } else if (!has_adjacent_rows(update)) {
      expand_tokens<StageRows::kPadded, 2>(work, column);
    } else if (work.rank <= kColumnsOfMultiply / 2) {
      expand_tokens<StageRows::kAdjacent, 4>(work, column);
    } else {
      expand_tokens<StageRows::kAdjacent, 2>(work, column);
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
    bool b_is_aligned;  ///< all rows of B are
  };

  /// Rows of B in a stage: complete and adjacent as in memory, or kColumnsOfMultiply columns.
  enum class StageRows : bool { kAdjacent, kPadded };

  static __device__ bool has_adjacent_rows(const Update& update) {
    return update.rank <= kColumnsOfMultiply && update.rank % 2 == 0 && rows_are_aligned(update.b, 0);
  }

  static __device__ Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory()); }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  static __device__ void copy_base(const Work& work, int first_column) {
    if (work.base == work.y) return;
    const int last_column = min(first_column + kWarpColumns, work.width);
    ADAPTRT_NO_UNROLL
    for (int column = first_column + lane() % 16 * kVector; column < last_column; column += kWarpColumns) {
      ADAPTRT_NO_UNROLL
      for (int token = lane() / 16; token < work.tokens; token += 2) {
        const std::int64_t at = static_cast<std::int64_t>(token) * work.stride + column;
        *reinterpret_cast<Vector16*>(work.y + at) = *reinterpret_cast<const Vector16*>(work.base + at);
      }
    }
  }

  template <StageRows kRows, int kStages>
  static __device__ void expand_tokens(const Work& work, int first_column) {
    if (work.tokens <= 8) {
      expand<kRows, kStages, 1>(work, first_column);
    } else {
      expand<kRows, kStages, 2>(work, first_column);
    }
  }

  /// Copies the stages of a warp, one after another. A stage has 32 rows of B, and up to 32 columns of them.
  template <StageRows kRows, int kStages>
  struct Copies {
    int column;
    int last_column;
    int k = 0;

    static __device__ unsigned char* stage_at(int stage) {
      return shared().rings[threadIdx.x / kWarpSize] + stage * (kRingBytes / kStages);
    }

    /// Starts copying the next rows or columns to `stage`, if there are any.
    __device__ void start(const Work& work, int stage) {
      if (column < last_column) {
        const T* rows = work.b + static_cast<std::int64_t>(column) * work.rank;
        const int count = min(kGroupColumns, work.width - column);
        unsigned char* const destination = stage_at(stage);
        if constexpr (kRows == StageRows::kAdjacent) {
          // Complete rows are adjacent. The width is a multiple of 8, so their size is one of 16 bytes.
          ADAPTRT_NO_UNROLL
          for (int at = lane() * kVector; at < count * work.rank; at += kWarpSize * kVector) {
            copy_async_16(destination + at * static_cast<int>(sizeof(T)), rows + at, true);
          }
        } else {
          ADAPTRT_NO_UNROLL
          for (int row = lane() / 4; row < kGroupColumns; row += kWarpSize / 4) {
            const int from = k + lane() % 4 * kVector;
            const T* source = rows + static_cast<std::int64_t>(row) * work.rank;
            unsigned char* const to =
                destination + (4 * row + lane() % 4) * static_cast<int>(sizeof(Vector16));
            if (work.b_is_aligned) {
              const bool valid = row < count && from < work.rank;
              copy_async_16(to, valid ? source + from : work.b, valid);
            } else {
              copy_elements(to, source + from, row < count ? work.rank - from : 0);
            }
          }
        }
        k += kColumnsOfMultiply;
        if (k >= work.rank) {
          k = 0;
          column += kGroupColumns;
        }
      }
      commit_copies();
    }
  };

  /// Elements vector .. vector + 7 of a row of a stage whose first column is `k`.
  template <StageRows kRows>
  static __device__ Vector16 staged(const Work& work, const unsigned char* stage, int row, int k,
                                    int vector) {
    const int pitch = kRows == StageRows::kAdjacent ? work.rank : kColumnsOfMultiply;
    const T* elements = reinterpret_cast<const T*>(stage) + row * pitch + vector;
    Vector16 result = {{0, 0, 0, 0}};
    if (kRows == StageRows::kPadded || pitch % kVector == 0) {
      if (k + vector < work.rank) result = *reinterpret_cast<const Vector16*>(elements);
    } else {
      ADAPTRT_UNROLL
      for (int i = 0; i < kVector / 2; ++i) {
        if (vector + 2 * i < work.rank) result.words[i] = reinterpret_cast<const std::uint32_t*>(elements)[i];
      }
    }
    return result;
  }

  /// Loads this thread's vectors of base.
  template <int kHalves>
  static __device__ void load_base(Vector16 (&base)[kHalves], const Work& work, int column) {
    ADAPTRT_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      const int token = lane() / 4 + 8 * half;
      base[half] =
          load_own_vector<Rows::kOfVectors>(work.base + static_cast<std::int64_t>(token) * work.stride,
                                            column, token < work.tokens ? work.width : 0);
    }
  }

  /// Computes the warp's columns for up to 8 kHalves tokens, which are the rows of the mma. Its columns are
  /// in the same order as in Expand.
  template <StageRows kRows, int kStages, int kHalves>
  static __device__ void expand(const Work& work, int first_column) {
    const int group = lane() / 4;
    const int vector = lane() % 4 * kVector;
    const int last_column = min(first_column + kWarpColumns, work.width);
    Copies<kRows, kStages> copies{.column = first_column, .last_column = last_column};
    ADAPTRT_NO_UNROLL
    for (int i = 0; i < kStages; ++i) copies.start(work, i);
    if (work.magnitude != nullptr && first_column + 4 * lane() < last_column) {
      prefetch(work.magnitude + first_column + 4 * lane());
    }
    if (work.shift != nullptr && first_column + 4 * lane() < last_column) {
      prefetch(work.shift + first_column + 4 * lane());
    }
    wait_for_previous_kernel();
    Vector16 next_base[kHalves];
    if (kHalves == 1) load_base(next_base, work, first_column + vector);
    int stage = 0;
    ADAPTRT_NO_UNROLL
    for (int column = first_column; column < last_column; column += kGroupColumns) {
      // Only few tokens leave registers for loading the next columns' base ahead.
      Vector16 base[kHalves];
      if (kHalves == 1) {
        base[0] = next_base[0];
        if (column + kGroupColumns < last_column) load_base(next_base, work, column + kGroupColumns + vector);
      } else {
        load_base(base, work, column + vector);
      }
      float sums[4][4] = {};
      ADAPTRT_NO_UNROLL
      for (int k = 0; k < work.rank; k += kColumnsOfMultiply) {
        Vector16 shrunk[2] = {};
        ADAPTRT_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          const int token = group + 8 * half;
          shrunk[half] = load_own_vector<Rows::kOfVectors>(
              work.shrunk + static_cast<std::int64_t>(token) * work.shrunk_stride, k + vector,
              token < work.tokens ? work.rank : 0);
        }
        wait_copies<kStages - 1>();
        __syncwarp();
        ADAPTRT_UNROLL
        for (int j = 0; j < 4; ++j) {
          const int row = group / 2 * 8 + group % 2 + 2 * j;
          multiply_32<T>(sums[j], shrunk[0], shrunk[1],
                         staged<kRows>(work, copies.stage_at(stage), row, k, vector));
        }
        __syncwarp();
        copies.start(work, stage);
        stage = (stage + 1) % kStages;
      }
      finish<kHalves>(work, column + vector, base, sums);
    }
  }

  /// Adds the base to the sums of eight adjacent columns, applies magnitudes and shifts, and stores y.
  template <int kHalves>
  static __device__ void finish(const Work& work, int column, const Vector16 (&base)[kHalves],
                                const float (&sums)[4][4]) {
    const RowVectors vectors(work.magnitude, work.shift, column, work.width);
    ADAPTRT_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      const int token = lane() / 4 + 8 * half;
      Vector16 result;
      ADAPTRT_UNROLL
      for (int j = 0; j < 4; ++j) {
        const FloatPair of_base = unpack_pair<T>(base[half].words[j]);
        result.words[j] = pack_pair<T>(vectors.apply(of_base.first + sums[j][2 * half], 2 * j),
                                       vectors.apply(of_base.second + sums[j][2 * half + 1], 2 * j + 1));
      }
      store_vector<Rows::kOfVectors>(work.y + static_cast<std::int64_t>(token) * work.stride, column,
                                     token < work.tokens ? work.width : 0, result);
    }
  }
};

}  // namespace adaptrt::cuda::lora
