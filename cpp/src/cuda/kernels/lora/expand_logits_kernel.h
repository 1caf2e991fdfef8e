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

/// y = (y + shrunk B^T) * magnitude + shift in float32, in place, for logits. The parts are slices of the
/// vocabulary.
///
/// Grid: x token tiles (max_token_tiles), y blocks of kBlockColumns columns of each part. A thread computes
/// one column for up to kTokens tokens at a time. It loads its row of B once for them, which takes most of
/// the time. Each sum adds the rank's elements in order.
template <typename T>
class ExpandLogits {
 public:
  struct Parameters {
    Step step;
    float* y;  ///< [tokens, stride]
    int stride;
    bool dora;
  };

  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 3;
  static constexpr int kBlockColumns = kThreads;
  static constexpr int kTokens = 16;

 private:
  /// Elements of the rank that are in shared memory at a time.
  static constexpr int kRankChunk = 32;

  struct Shared {
    TileSearch search;
    float shrunk[kRankChunk][kTokens];
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
    wait_for_previous_kernel();
    if (update.rank == 0) return;
    const Part& part = p.step.parts[columns.part];
    const int column = columns.first + static_cast<int>(threadIdx.x);
    for (int token = 0; token < tile.count; token += kTokens) {
      const int first = tile.first + token;
      const int tokens = min(tile.count - token, kTokens);
      float sums[kTokens] = {};
      for (int k = 0; k < update.rank; k += kRankChunk) {
        load_shrunk(shrunk_row<T>(p.step, columns.part, first) + k, p.step.shrunk_stride, tokens,
                    update.rank - k);
        if (column < part.out) {
          const T* row = static_cast<const T*>(update.b) + static_cast<std::int64_t>(column) * update.rank;
          if (rows_are_aligned(update.b, update.rank)) {
            add_products<Rows::kOfVectors>(sums, row, k, update.rank);
          } else {
            add_products<Rows::kAnyhow>(sums, row, k, update.rank);
          }
        }
      }
      if (column >= part.out) continue;
      const float factor = p.dora && update.magnitude != nullptr ? update.magnitude[column] : 1.0F;
      const float shift = update.shift != nullptr ? update.shift[column] : 0.0F;
      float* y = p.y + static_cast<std::int64_t>(first) * p.stride + part.start + column;
      ADAPTRT_UNROLL
      for (int i = 0; i < kTokens; ++i) {
        if (i < tokens) {
          float& logit = y[static_cast<std::int64_t>(i) * p.stride];
          logit = fmaf(logit + sums[i], factor, shift);
        }
      }
    }
  }

 private:
  static __device__ Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory()); }

  /// Loads up to kRankChunk elements of the tokens' rows, with zeros after them.
  static __device__ void load_shrunk(const T* rows, int stride, int tokens, int elements) {
    __syncthreads();
    ADAPTRT_NO_UNROLL
    for (int i = static_cast<int>(threadIdx.x); i < kRankChunk * kTokens; i += kThreads) {
      const int token = i / kRankChunk;
      const int k = i % kRankChunk;
      const bool exists = token < tokens && k < elements;
      shared().shrunk[k][token] =
          exists ? to_float(rows[static_cast<std::int64_t>(token) * stride + k]) : 0.0F;
    }
    __syncthreads();
  }

  /// Adds the products of elements k .. k + kRankChunk - 1 of a row of B.
  template <Rows kRows>
  static __device__ void add_products(float (&sums)[kTokens], const T* row, int k, int rank) {
    ADAPTRT_NO_UNROLL
    for (int vector = 0; vector < kRankChunk && k + vector < rank; vector += kVector) {
      const Vector16 b = load_vector<kRows>(row, k + vector, rank);
      ADAPTRT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        const FloatPair pair = unpack_pair<T>(b.words[i / 2]);
        const float element = i % 2 == 0 ? pair.first : pair.second;
        ADAPTRT_UNROLL
        for (int token = 0; token < kTokens; ++token) {
          sums[token] = fmaf(shared().shrunk[vector + i][token], element, sums[token]);
        }
      }
    }
  }
};

}  // namespace adaptrt::cuda::lora
