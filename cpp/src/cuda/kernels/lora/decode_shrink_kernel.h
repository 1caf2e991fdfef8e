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

/// Shrink for short steps, where loading A takes all the time. The sums have the same order as in Shrink, so
/// the bits are the same. x is aligned to 16 bytes, and the width is a multiple of kVector.
///
/// Grid: x token tiles of up to kTokens (max_token_tiles), y rank lanes times parts. The part changes
/// fastest, so that blocks without rows start last. A block computes every rank_lanes-th tile of kRows rows.
///
/// Each warp has one slice of the input's width. It copies its rows of A to its own ring of stages in shared
/// memory, up to kStages ahead. The first stages are copied while the previous kernel still computes x.
template <typename T>
class DecodeShrink {
 public:
  struct Parameters {
    Step step;
    const void* x;  ///< [tokens, in]
    int in;
    int rank_lanes;
  };

  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = kDecodeBlocksPerMultiprocessor;
  static constexpr int kTokens = 16;
  static constexpr int kRows = 8;

 private:
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kChunk = 64;
  static constexpr int kStages = 8;
  static constexpr int kVectorsOfChunk = kChunk / kVector;
  static constexpr int kRowBytes = kChunk * static_cast<int>(sizeof(T));
  static constexpr int kStageBytes = kRows * kRowBytes;
  /// Stride that spreads the threads of a warp over different banks.
  static constexpr int kSumStride = 12;
  static_assert(kWarps == kSlices && kChunk == kSliceUnit);

  struct Shared {
    alignas(16) unsigned char stages[kWarps][kStages][kStageBytes];
    float sums[kWarps][kTokens][kSumStride];
    TileSearch search;
  };

 public:
  static constexpr std::size_t kSharedBytes = sizeof(Shared);

  static __device__ void run(const Parameters& p) {
    allow_next_kernel();
    const TokenTile tile = find_token_tile(p.step, static_cast<int>(blockIdx.x), shared().search);
    const int part = static_cast<int>(blockIdx.y) % p.step.num_parts;
    const int first_row = static_cast<int>(blockIdx.y) / p.step.num_parts * kRows;
    const Update update = update_of(p.step, tile, part);
    if (first_row >= update.rank) {
      wait_for_previous_kernel();
      return;
    }
    const Work work{.x = static_cast<const T*>(p.x) + static_cast<std::int64_t>(tile.first) * p.in,
                    .a = static_cast<const T*>(update.a),
                    .out = shrunk_row<T>(p.step, part, tile.first),
                    .in = p.in,
                    .rank = update.rank,
                    .tokens = tile.count,
                    .out_stride = p.step.shrunk_stride,
                    .first_row = first_row,
                    .row_step = p.rank_lanes * kRows};
    if (!rows_are_aligned(update.a, p.in)) {
      shrink<Rows::kAnyhow, 2>(work);
    } else if (tile.count <= 8) {
      shrink<Rows::kOfVectors, 1>(work);
    } else {
      shrink<Rows::kOfVectors, 2>(work);
    }
  }

 private:
  /// A block's work and its adapter.
  struct Work {
    const T* x;  ///< first token of the tile
    const T* a;
    T* out;  ///< first token of the tile
    int in;
    int rank;
    int tokens;
    int out_stride;
    int first_row;
    int row_step;
  };

  static __device__ Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory()); }

  /// Copies the stages of a warp, one after another.
  template <Rows kRowsOfA>
  struct Copies {
    int row;
    int k;

    /// Starts copying the next chunk to `stage`, if there is one: `kChunk` columns of kRows rows; zeros
    /// outside of A.
    __device__ void start(const Work& work, int stage, int begin, int end) {
      if (row < work.rank && begin < end) {
        constexpr int kRowsAtOnce = kWarpSize / kVectorsOfChunk;
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
        const int own_row = lane / kVectorsOfChunk;
        const int column = k + lane % kVectorsOfChunk * kVector;
        unsigned char* const to =
            shared().stages[threadIdx.x / kWarpSize][stage] + staged_offset(own_row, lane % kVectorsOfChunk);
        const T* source = work.a + static_cast<std::int64_t>(row + own_row) * work.in + column;
        ADAPTRT_UNROLL
        for (int i = 0; i < kRows; i += kRowsAtOnce) {
          const bool exists = row + own_row + i < work.rank;
          if constexpr (kRowsOfA == Rows::kOfVectors) {
            const bool valid = exists && column < end;
            copy_async_16(to + i * kRowBytes, valid ? source : work.a, valid);
          } else {
            copy_elements(to + i * kRowBytes, source, exists ? end - column : 0);
          }
          source += kRowsAtOnce * work.in;
        }
        k += kChunk;
        if (k >= end) {
          k = begin;
          row += work.row_step;
        }
      }
      commit_copies();
    }
  };

  /// Computes the block's rows for up to 8 kHalves tokens.
  template <Rows kRowsOfA, int kHalves>
  static __device__ void shrink(const Work& work) {
    // A thread loads the vectors of x for this many chunks at once. More need too many registers.
    constexpr int kBatch = kRowsOfA == Rows::kOfVectors && kHalves == 1 ? 3 : 1;
    constexpr int kProducts = kChunk / kColumnsOfMultiply;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int group = static_cast<int>(threadIdx.x) % kWarpSize / 4;
    const int pair = static_cast<int>(threadIdx.x) % 4;
    const int width = slice_width(work.in);
    const int begin = min(warp * width, work.in);
    const int end = min(begin + width, work.in);
    Copies<kRowsOfA> copies{.row = work.first_row, .k = begin};
    ADAPTRT_NO_UNROLL
    for (int i = 0; i < kStages; ++i) copies.start(work, i, begin, end);
    wait_for_previous_kernel();
    int stage = 0;
    ADAPTRT_NO_UNROLL
    for (int row = work.first_row; row < work.rank; row += work.row_step) {
      float sums[kHalves][4] = {};
      ADAPTRT_NO_UNROLL
      for (int k = begin; k < end; k += kBatch * kChunk) {
        Vector16 x[kBatch * kProducts][kHalves];
        ADAPTRT_UNROLL
        for (int i = 0; i < kBatch * kProducts * kHalves; ++i) {
          const int token = group + 8 * (i % kHalves);
          x[i / kHalves][i % kHalves] = load_own_vector<Rows::kOfVectors>(
              work.x + static_cast<std::int64_t>(token) * work.in,
              k + i / kHalves * kColumnsOfMultiply + pair * kVector, token < work.tokens ? end : 0);
        }
        ADAPTRT_UNROLL
        for (int chunk = 0; chunk < kBatch; ++chunk) {
          if (k + chunk * kChunk >= end) break;
          wait_copies<kStages - 1>();
          __syncwarp();
          ADAPTRT_UNROLL
          for (int i = 0; i < kProducts; ++i) {
            const auto& a = *reinterpret_cast<const Vector16*>(shared().stages[warp][stage] +
                                                               staged_offset(group, 4 * i + pair));
            ADAPTRT_UNROLL
            for (int half = 0; half < kHalves; ++half) {
              multiply_32<T>(sums[half], a, Vector16{{0, 0, 0, 0}}, x[chunk * kProducts + i][half]);
            }
          }
          __syncwarp();
          copies.start(work, stage, begin, end);
          stage = (stage + 1) % kStages;
        }
      }
      add_slices<kHalves>(work, row, sums);
    }
  }

  /// Adds the warps' sums in the order of the slices.
  template <int kHalves>
  static __device__ void add_slices(const Work& work, int first_row, const float (&sums)[kHalves][4]) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kWarpSize;
    ADAPTRT_UNROLL
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int token = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
      shared().sums[thread / kWarpSize][token][lane / 4] = sums[i / 2][i % 2];
    }
    __syncthreads();
    const int row = thread % kRows;
    const int token = thread / kRows;
    if (token < work.tokens) {
      float total = 0.0F;
      ADAPTRT_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) total += shared().sums[slice][token][row];
      // Rows from the rank on, up to the padding, are zero for any x.
      work.out[static_cast<std::int64_t>(token) * work.out_stride + first_row + row] =
          from_float<T>(first_row + row < work.rank ? total : 0.0F);
    }
    __syncthreads();
  }

  /// Offset of a vector in a stage. Rows are 128 bytes, and adjacent rows have their halves swapped, so that
  /// eight threads that read four vectors of two rows use all banks.
  static __device__ int staged_offset(int row, int vector) {
    return row * kRowBytes +
           (vector ^ (row % 2 * (kVectorsOfChunk / 2))) * static_cast<int>(sizeof(Vector16));
  }
};

}  // namespace adaptrt::cuda::lora
