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

/// shrunk = round(x A^T), for all parts.
///
/// Grid: x token tiles (max_token_tiles), y parts times `rank_lanes`; a block computes every rank_lanes-th
/// tile of the rank's rows. The rank's rows are the rows of the mma, tokens its columns.
///
/// The input width is divided into kSlices slices of whole kChunk columns. Tensor cores sum each slice from
/// its first column to its last, and the slices' sums are added in order. Both methods below do this.
///   Few tokens (up to kFewTokens): each warp has one slice. It loads rows of A and x from global memory to
///   registers, several vectors in flight. The warps' sums are added in shared memory.
///   Many tokens: the block's tiles of A and x go through shared memory, prefetched by cp.async. Each
///   warp has some ranks and tokens, and computes one slice after another.
template <typename T>
class Shrink {
 public:
  struct Parameters {
    Step step;
    const void* x;  ///< [tokens, in]
    int in;
    int rank_lanes;
  };

  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kFewTokens = 16;
  static constexpr int kManyTokens = 64;
  /// Rows of the rank per block, for few tokens and for many.
  static constexpr int kFewTokensRows = 16;
  static constexpr int kManyTokensRows = 64;

  static constexpr std::size_t kFewTokensSharedBytes = sizeof(TileSearch) + 8 * 16 * 20 * sizeof(float);
  static constexpr std::size_t kManyTokensSharedBytes = 3 * 2 * 64 * 64 * sizeof(T);

  static __device__ void run(const Parameters& p) {
    allow_next_kernel();
    auto& search = *reinterpret_cast<TileSearch*>(shared_memory());
    const TokenTile tile = find_token_tile(p.step, static_cast<int>(blockIdx.x), search);
    // The copies below reuse the search's shared memory.
    __syncthreads();
    const int part = static_cast<int>(blockIdx.y) / p.rank_lanes;
    const Update update = update_of(p.step, tile, part);
    wait_for_previous_kernel();
    const T* x = static_cast<const T*>(p.x) + static_cast<std::int64_t>(tile.first) * p.in;
    const bool aligned = rows_are_aligned(p.x, p.in) && rows_are_aligned(update.a, p.in);
    const Work work{.x = x,
                    .a = static_cast<const T*>(update.a),
                    .out = shrunk_row<T>(p.step, part, tile.first),
                    .in = p.in,
                    .slice = slice_width(p.in),
                    .rank = update.rank,
                    .tokens = tile.count,
                    .out_stride = p.step.shrunk_stride,
                    .aligned = aligned};
    const int lane = static_cast<int>(blockIdx.y) % p.rank_lanes;
    if (tile.count <= kFewTokens) {
      for (int row = lane * kFewTokensRows; row < work.rank; row += p.rank_lanes * kFewTokensRows) {
        if (aligned) {
          shrink_few_tokens<Rows::kOfVectors>(work, row);
        } else {
          shrink_few_tokens<Rows::kAnyhow>(work, row);
        }
      }
    } else {
      for (int row = lane * kManyTokensRows; row < work.rank; row += p.rank_lanes * kManyTokensRows) {
        shrink_many_tokens(work, row);
      }
    }
  }

 private:
  static constexpr int kChunk = kSliceUnit;
  static constexpr int kStages = 3;
  static constexpr int kVectorsOfChunk = kChunk / kVector;
  /// Products of 32 columns whose vectors a warp has in flight.
  static constexpr int kInFlight = 4;
  /// Stride that spreads the threads of a warp over different banks.
  static constexpr int kSumStride = 20;

  /// A block's work and its adapter.
  struct Work {
    const T* x;  ///< first token of the tile
    const T* a;
    T* out;  ///< first token of the tile
    int in;
    int slice;
    int rank;
    int tokens;
    int out_stride;
    bool aligned;
  };

  /// Rows from the rank on, up to the padding, are zero for any x.
  static __device__ void write(const Work& work, int row, int token, float sum) {
    const int padded = (work.rank + kVector - 1) / kVector * kVector;
    if (row >= padded || token >= work.tokens) return;
    work.out[static_cast<std::int64_t>(token) * work.out_stride + row] =
        from_float<T>(row < work.rank ? sum : 0.0F);
  }

  template <Rows kRows>
  static __device__ void shrink_few_tokens(const Work& work, int first_row) {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize;
    const int group = thread % kWarpSize / 4;
    const int column = thread % 4 * kVector;
    float sums[2][4] = {};
    const int begin = warp * work.slice;
    const int end = min(begin + work.slice, work.in);
    const T* a_rows[2];
    const T* x_rows[2];
    int a_widths[2];
    int x_widths[2];
    ADAPTRT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + group + 8 * i;
      const int token = group + 8 * i;
      a_rows[i] = work.a + static_cast<std::int64_t>(row) * work.in;
      x_rows[i] = work.x + static_cast<std::int64_t>(token) * work.in;
      a_widths[i] = row < work.rank ? end : 0;
      x_widths[i] = token < work.tokens ? end : 0;
    }
    for (int k = begin; k < end; k += kInFlight * kColumnsOfMultiply) {
      Vector16 a[kInFlight][2];
      Vector16 x[kInFlight][2];
      ADAPTRT_UNROLL
      for (int j = 0; j < kInFlight; ++j) {
        ADAPTRT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int at = k + j * kColumnsOfMultiply + column;
          a[j][i] = load_vector<kRows>(a_rows[i], at, a_widths[i]);
          x[j][i] = load_own_vector<kRows>(x_rows[i], at, x_widths[i]);
        }
      }
      ADAPTRT_UNROLL
      for (int j = 0; j < kInFlight; ++j) {
        multiply_32<T>(sums[0], a[j][0], a[j][1], x[j][0]);
        multiply_32<T>(sums[1], a[j][0], a[j][1], x[j][1]);
      }
    }
    add_slices(work, first_row, sums);
  }

  /// Adds the warps' sums, of 16 rows and 16 tokens each, in the order of the slices.
  static __device__ void add_slices(const Work& work, int first_row, const float (&sums)[2][4]) {
    auto* shared = reinterpret_cast<float*>(shared_memory());
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kWarpSize;
    float* own = shared + thread / kWarpSize * kFewTokens * kSumStride;
    ADAPTRT_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      ADAPTRT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * tile + 2 * (lane % 4) + i % 2;
        own[token * kSumStride + lane / 4 + 8 * (i / 2)] = sums[tile][i];
      }
    }
    __syncthreads();
    const int row = thread % kFewTokensRows;
    const int token = thread / kFewTokensRows;
    float total = 0.0F;
    ADAPTRT_UNROLL
    for (int slice = 0; slice < kSlices; ++slice)
      total += shared[(slice * kFewTokens + token) * kSumStride + row];
    write(work, first_row + row, token, total);
    __syncthreads();
  }

  static __device__ void shrink_many_tokens(const Work& work, int first_row) {
    constexpr int kStageBytes = (kManyTokensRows + kManyTokens) * kChunk * static_cast<int>(sizeof(T));
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize;
    const int group = thread % kWarpSize / 4;
    const int pair = thread % 4;
    // Four warps along the tokens and two along the rows; each computes 32 rows by 16 tokens.
    const int warp_row = warp % 2 * 32;
    const int warp_token = warp / 2 * 16;
    const int rows = min(kManyTokensRows, work.rank - first_row);
    float totals[2][2][4] = {};
    float sums[2][2][4] = {};
    const int chunks = (work.in + kChunk - 1) / kChunk;
    for (int chunk = 0; chunk < kStages - 1; ++chunk) {
      if (chunk < chunks) copy_chunk(work, first_row, rows, chunk, shared_memory() + chunk * kStageBytes);
      commit_copies();
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      wait_copies<kStages - 2>();
      __syncthreads();
      const int ahead = chunk + kStages - 1;
      if (ahead < chunks) {
        copy_chunk(work, first_row, rows, ahead, shared_memory() + ahead % kStages * kStageBytes);
      }
      commit_copies();
      const unsigned char* stage = shared_memory() + chunk % kStages * kStageBytes;
      ADAPTRT_UNROLL
      for (int part = 0; part < kChunk / kColumnsOfMultiply; ++part) {
        const int vector = part * 4 + pair;
        Vector16 x[2];
        ADAPTRT_UNROLL
        for (int n = 0; n < 2; ++n)
          x[n] = staged(stage, kManyTokensRows + warp_token + 8 * n + group, vector);
        ADAPTRT_UNROLL
        for (int m = 0; m < 2; ++m) {
          if (warp_row + 16 * m >= rows) continue;
          const Vector16 a = staged(stage, warp_row + 16 * m + group, vector);
          const Vector16 a_8 = staged(stage, warp_row + 16 * m + group + 8, vector);
          ADAPTRT_UNROLL
          for (int n = 0; n < 2; ++n) multiply_32<T>(sums[m][n], a, a_8, x[n]);
        }
      }
      if ((chunk + 1) * kChunk % work.slice == 0 || chunk + 1 == chunks) add_slice(totals, sums);
    }
    ADAPTRT_UNROLL
    for (int m = 0; m < 2; ++m) {
      ADAPTRT_UNROLL
      for (int n = 0; n < 2; ++n) {
        ADAPTRT_UNROLL
        for (int i = 0; i < 4; ++i) {
          write(work, first_row + warp_row + 16 * m + group + 8 * (i / 2),
                warp_token + 8 * n + 2 * pair + i % 2, totals[m][n][i]);
        }
      }
    }
    __syncthreads();
  }

  static __device__ void add_slice(float (&totals)[2][2][4], float (&sums)[2][2][4]) {
    ADAPTRT_UNROLL
    for (int i = 0; i < 16; ++i) {
      float& sum = sums[i / 8][i / 4 % 2][i % 4];
      totals[i / 8][i / 4 % 2][i % 4] += sum;
      sum = 0.0F;
    }
  }

  /// Offset of a vector in a row of a stage. Rows are 128 bytes, and adjacent rows have their halves swapped,
  /// so that eight threads that read four vectors of two rows use all banks.
  static __device__ int staged_offset(int row, int vector) {
    return row * kChunk * static_cast<int>(sizeof(T)) +
           (vector ^ (row % 2 * (kVectorsOfChunk / 2))) * static_cast<int>(sizeof(Vector16));
  }

  static __device__ Vector16 staged(const unsigned char* stage, int row, int vector) {
    return *reinterpret_cast<const Vector16*>(stage + staged_offset(row, vector));
  }

  /// Starts copying `kChunk` columns of the rows of A, then of x, to a stage; zeros outside of the matrices.
  static __device__ void copy_chunk(const Work& work, int first_row, int rows, int chunk,
                                    unsigned char* stage) {
    for (int i = static_cast<int>(threadIdx.x); i < (kManyTokensRows + kManyTokens) * kVectorsOfChunk;
         i += kThreads) {
      const int row = i / kVectorsOfChunk;
      const int vector = i % kVectorsOfChunk;
      const bool of_a = row < kManyTokensRows;
      const int from = of_a ? first_row + row : row - kManyTokensRows;
      const bool exists = of_a ? row < rows : from < work.tokens;
      const T* source = (of_a ? work.a : work.x) + static_cast<std::int64_t>(exists ? from : 0) * work.in;
      const int k = chunk * kChunk + vector * kVector;
      unsigned char* destination = stage + staged_offset(row, vector);
      if (work.aligned) {
        const bool valid = exists && k < work.in;
        copy_async_16(destination, source + (valid ? k : 0), valid);
      } else {
        *reinterpret_cast<Vector16*>(destination) = gather_vector(source, k, exists ? work.in : 0);
      }
    }
  }
};

}  // namespace adaptrt::cuda::lora
