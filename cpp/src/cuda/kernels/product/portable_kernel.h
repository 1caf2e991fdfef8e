#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::product {

/// The product with mma.sync, which every GPU since sm_80 has, and the tests' emulation as well.
///
/// Grid: x tiles of outputs, y tiles of tokens. A warp computes 16 outputs, the rows of the mma, for all
/// tokens of the tile, its columns. cp.async prefetches weights and x into shared memory, two stages ahead.
///
/// `Output` is T or float.
template <typename T, typename Output = T>
class Portable {
 public:
  struct Parameters {
    const void* x;        ///< [tokens, in]
    const void* weights;  ///< [out, in]
    void* y;              ///< [tokens, out]
    int in;               ///< a multiple of 8
    int out;
    int tokens;
  };

  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr int kOutputs = 64;
  static constexpr int kTokens = 32;
  static constexpr std::size_t kSharedBytes =
      static_cast<std::size_t>(3) * (kOutputs + kTokens) * (64 + 8) * sizeof(T);

  static __device__ void run(const Parameters& p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    multiply_tile(p, static_cast<int>(blockIdx.y) * kTokens, [](int token) { return token; });
  }

  /// Multiplies the block's outputs for tokens from `first_token` on. row_of(token): row of x.
  template <typename RowOf>
  static __device__ void multiply_tile(const Parameters& p, int first_token, const RowOf& row_of) {
    multiply_tile(p, first_token, row_of, [&](int output) {
      return static_cast<const T*>(p.weights) + static_cast<std::int64_t>(output) * p.in;
    });
  }

  /// The same with weights anywhere. weights_of(output): address of the output's row; nullptr: zeros.
  template <typename RowOf, typename WeightsOf>
  static __device__ void multiply_tile(const Parameters& p, int first_token, const RowOf& row_of,
                                       const WeightsOf& weights_of) {
    const int first_output = static_cast<int>(blockIdx.x) * kOutputs;
    T* buffers = reinterpret_cast<T*>(shared_memory());
    const int blocks = (p.in + kColumns - 1) / kColumns;
    for (int block = 0; block < kStages - 1; ++block) {
      load(p, buffers + block * kStageElements, first_output, first_token, block, row_of, weights_of);
    }
    float sums[kTokens / 8][4] = {};
    for (int block = 0; block < blocks; ++block) {
      wait_copies<kStages - 2>();
      // Also protects the stage that is loaded next until all warps have read it.
      __syncthreads();
      const int next = block + kStages - 1;
      load(p, buffers + next % kStages * kStageElements, first_output, first_token, next, row_of, weights_of);
      multiply(sums, buffers + block % kStages * kStageElements);
    }
    store(p, sums, first_output, first_token);
  }

 private:
  static constexpr int kStages = 3;
  static constexpr int kColumns = 64;
  /// Rows are padded by 16 bytes, so that ldmatrix has no bank conflicts.
  static constexpr int kStride = kColumns + 8;
  static constexpr int kStageElements = (kOutputs + kTokens) * kStride;
  static constexpr int kVectorsOfRow = kColumns / 8;

  /// Starts copying columns of the tile; zeros outside of the matrices.
  template <typename RowOf, typename WeightsOf>
  static __device__ void load(const Parameters& p, T* stage, int first_output, int first_token, int block,
                              const RowOf& row_of, const WeightsOf& weights_of) {
    for (int i = static_cast<int>(threadIdx.x); i < (kOutputs + kTokens) * kVectorsOfRow; i += kThreads) {
      const int row = i / kVectorsOfRow;
      const int vector = i % kVectorsOfRow * 8;
      const int column = block * kColumns + vector;
      const bool is_weight = row < kOutputs;
      const int index = is_weight ? first_output + row : first_token + row - kOutputs;
      const T* x = static_cast<const T*>(p.x);
      const T* from = nullptr;
      if (column < p.in && index < (is_weight ? p.out : p.tokens)) {
        from = is_weight ? weights_of(index) : x + static_cast<std::int64_t>(row_of(index)) * p.in;
      }
      const bool valid = from != nullptr;
      copy_async_16(stage + row * kStride + vector, valid ? from + column : x, valid);
    }
    commit_copies();
  }

  static __device__ void multiply(float (&sums)[kTokens / 8][4], const T* stage) {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize;
    const int lane = thread % kWarpSize;
    const T* weights = stage + (warp * 16 + lane % 16) * kStride + lane / 16 * 8;
    const T* x = stage + (kOutputs + lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
    ADAPTRT_UNROLL
    for (int column = 0; column < kColumns; column += 16) {
      std::uint32_t a[4];
      load_matrix_x4(a, weights + column);
      ADAPTRT_UNROLL
      for (int tokens = 0; tokens < kTokens; tokens += 16) {
        std::uint32_t b[4];
        load_matrix_x4(b, x + tokens * kStride + column);
        const std::uint32_t first[2] = {b[0], b[1]};
        const std::uint32_t second[2] = {b[2], b[3]};
        mma_16x8x16<T>(sums[tokens / 8], a, first);
        mma_16x8x16<T>(sums[tokens / 8 + 1], a, second);
      }
    }
  }

  static __device__ void store(const Parameters& p, const float (&sums)[kTokens / 8][4], int first_output,
                               int first_token) {
    const int thread = static_cast<int>(threadIdx.x);
    const int output = first_output + thread / kWarpSize * 16 + thread % kWarpSize / 4;
    ADAPTRT_UNROLL
    for (int tokens = 0; tokens < kTokens / 8; ++tokens) {
      ADAPTRT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = output + i / 2 * 8;
        const int token = first_token + tokens * 8 + thread % 4 * 2 + i % 2;
        if (row < p.out && token < p.tokens) {
          const std::int64_t at = static_cast<std::int64_t>(token) * p.out + row;
          const float value = sums[tokens][i];
          if constexpr (std::is_same_v<Output, float>) {
            static_cast<float*>(p.y)[at] = value;
          } else {
            static_cast<T*>(p.y)[at] = from_float<T>(value);
          }
        }
      }
    }
  }
};

}  // namespace adaptrt::cuda::product
