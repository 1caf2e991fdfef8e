#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::product {

/// The product with weights of kBits bits, with mma.sync.
///
/// Grid: x tiles of outputs, y tiles of tokens, as in Portable. A warp computes 16 outputs for all tokens of
/// the tile. Integers stay packed in shared memory, and become T in the registers of the threads that
/// multiply them. The sum of a group is multiplied by its scale and added to the sums of earlier groups.
///
/// `Output` is T or float.
template <typename T, int kBits, typename Output = T>
class Quantized {
 public:
  struct Parameters {
    const void* x;              ///< [tokens, in]
    const void* weights;        ///< kBits bits [out, in]
    const float* scales;        ///< [out, groups]
    const std::uint8_t* zeros;  ///< [out, groups] or nullptr
    void* y;                    ///< [tokens, out]
    int in;                     ///< a multiple of 16 bytes of weights
    int out;
    int tokens;
    int groups;
    int group_steps;  ///< columns of a group / 16
  };

  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr int kOutputs = 64;
  static constexpr int kTokens = 32;

 private:
  static constexpr int kStages = 4;
  static constexpr int kColumns = 64;
  /// Rows are padded by 16 bytes, so that the threads of a warp read different banks.
  static constexpr int kTokenBytes = (kColumns + 8) * 2;
  static constexpr int kWeightBytes = kColumns * kBits / 8 + 16;
  static constexpr int kStageBytes = kOutputs * kWeightBytes + kTokens * kTokenBytes;
  static constexpr int kColumnsOf16Bytes = 128 / kBits;
  static constexpr int kWeightVectors = kColumns / kColumnsOf16Bytes;
  static constexpr int kTokenVectors = kColumns / 8;
  static constexpr int kDefaultZero = 1 << (kBits - 1);
  static_assert(sizeof(T) == 2);

 public:
  static constexpr std::size_t kSharedBytes = std::size_t{kStages} * kStageBytes;

  static __device__ void run(const Parameters& p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    multiply_tile(p, static_cast<int>(blockIdx.y) * kTokens, [](int token) { return token; });
  }

  /// Multiplies the block's outputs for tokens from `first_token` on. row_of(token): row of x.
  template <typename RowOf>
  static __device__ void multiply_tile(const Parameters& p, int first_token, const RowOf& row_of) {
    const int first_output = static_cast<int>(blockIdx.x) * kOutputs;
    const int blocks = (p.in + kColumns - 1) / kColumns;
    for (int block = 0; block < kStages - 1; ++block) load(p, first_output, first_token, block, row_of);
    Sums sums;
    int group = 0;
    int steps_left = p.group_steps;
    Group of_rows[2] = {group_at(p, first_output, 0, group), group_at(p, first_output, 8, group)};
    for (int block = 0; block < blocks; ++block) {
      wait_copies<kStages - 2>();
      // Also protects the stage that is loaded next until all warps have read it.
      __syncthreads();
      load(p, first_output, first_token, block + kStages - 1, row_of);
      const int columns = p.in - block * kColumns < kColumns ? p.in - block * kColumns : kColumns;
      for (int column = 0; column < columns; column += 16) {
        if (steps_left == 0) {
          sums.finish_group(of_rows);
          ++group;
          steps_left = p.group_steps;
          of_rows[0] = group_at(p, first_output, 0, group);
          of_rows[1] = group_at(p, first_output, 8, group);
        }
        multiply(sums, stage(block), column, of_rows);
        --steps_left;
      }
    }
    sums.finish_group(of_rows);
    store(p, sums, first_output, first_token);
  }

 private:
  /// Scale and zero point of a group of one output.
  struct Group {
    float scale;
    int zero;
  };

  /// A thread's results: with g = lane / 4, rows g, g, g + 8, g + 8 of each tile of 8 tokens.
  struct Sums {
    float total[kTokens / 8][4] = {};
    float group[kTokens / 8][4] = {};

    __device__ void finish_group(const Group (&of_rows)[2]) {
      ADAPTRT_UNROLL
      for (int tokens = 0; tokens < kTokens / 8; ++tokens) {
        ADAPTRT_UNROLL
        for (int i = 0; i < 4; ++i) {
          total[tokens][i] = fmaf(of_rows[i / 2].scale, group[tokens][i], total[tokens][i]);
          group[tokens][i] = 0.0F;
        }
      }
    }
  };

  static __device__ int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  static __device__ unsigned char* stage(int block) {
    return shared_memory() + block % kStages * kStageBytes;
  }

  /// Group `group` of the thread's output with this offset.
  static __device__ Group group_at(const Parameters& p, int first_output, int offset, int group) {
    const int output = first_output + warp() * 16 + lane() / 4 + offset;
    if (output >= p.out) return {0.0F, kDefaultZero};
    const std::int64_t at = static_cast<std::int64_t>(output) * p.groups + group;
    return {p.scales[at], p.zeros == nullptr ? kDefaultZero : static_cast<int>(p.zeros[at])};
  }

  /// Starts copying columns of the tile; zeros outside of the matrices.
  template <typename RowOf>
  static __device__ void load(const Parameters& p, int first_output, int first_token, int block,
                              const RowOf& row_of) {
    unsigned char* to = stage(block);
    const auto* weights = static_cast<const unsigned char*>(p.weights);
    for (int i = static_cast<int>(threadIdx.x); i < kOutputs * kWeightVectors; i += kThreads) {
      const int row = i / kWeightVectors;
      const int vector = i % kWeightVectors;
      const int column = block * kColumns + vector * kColumnsOf16Bytes;
      const int output = first_output + row;
      const bool valid = column < p.in && output < p.out;
      const std::int64_t from = (static_cast<std::int64_t>(output) * p.in + column) * kBits / 8;
      copy_async_16(to + row * kWeightBytes + vector * 16, valid ? weights + from : weights, valid);
    }
    to += kOutputs * kWeightBytes;
    const T* x = static_cast<const T*>(p.x);
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kTokenVectors; i += kThreads) {
      const int row = i / kTokenVectors;
      const int column = block * kColumns + i % kTokenVectors * 8;
      const bool valid = column < p.in && first_token + row < p.tokens;
      const std::int64_t from = valid ? std::int64_t{row_of(first_token + row)} * p.in + column : 0;
      copy_async_16(to + row * kTokenBytes + i % kTokenVectors * 16, valid ? x + from : x, valid);
    }
    commit_copies();
  }

  /// Integers `column` and `column` + 1 of a row minus the zero point, as T.
  static __device__ std::uint32_t pair_at(const unsigned char* row, int column, int zero) {
    int first = 0;
    int second = 0;
    if constexpr (kBits == 8) {
      first = static_cast<signed char>(row[column]) + kDefaultZero;
      second = static_cast<signed char>(row[column + 1]) + kDefaultZero;
    } else {
      const int both = row[column / 2];
      first = both & 15;
      second = both >> 4;
    }
    return pack_pair<T>(static_cast<float>(first - zero), static_cast<float>(second - zero));
  }

  static __device__ void multiply(Sums& sums, const unsigned char* data, int column,
                                  const Group (&of_rows)[2]) {
    const unsigned char* low = data + (warp() * 16 + lane() / 4) * kWeightBytes;
    const unsigned char* high = low + 8 * kWeightBytes;
    const int at = column + lane() % 4 * 2;
    const std::uint32_t a[4] = {pair_at(low, at, of_rows[0].zero), pair_at(high, at, of_rows[1].zero),
                                pair_at(low, at + 8, of_rows[0].zero),
                                pair_at(high, at + 8, of_rows[1].zero)};
    const unsigned char* x = data + kOutputs * kWeightBytes + (lane() % 8 + lane() / 16 * 8) * kTokenBytes +
                             (column + lane() / 8 % 2 * 8) * 2;
    ADAPTRT_UNROLL
    for (int tokens = 0; tokens < kTokens; tokens += 16) {
      std::uint32_t b[4];
      load_matrix_x4(b, x + tokens * kTokenBytes);
      const std::uint32_t first[2] = {b[0], b[1]};
      const std::uint32_t second[2] = {b[2], b[3]};
      mma_16x8x16<T>(sums.group[tokens / 8], a, first);
      mma_16x8x16<T>(sums.group[tokens / 8 + 1], a, second);
    }
  }

  static __device__ void store(const Parameters& p, const Sums& sums, int first_output, int first_token) {
    const int output = first_output + warp() * 16 + lane() / 4;
    ADAPTRT_UNROLL
    for (int tokens = 0; tokens < kTokens / 8; ++tokens) {
      ADAPTRT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = output + i / 2 * 8;
        const int token = first_token + tokens * 8 + lane() % 4 * 2 + i % 2;
        if (row >= p.out || token >= p.tokens) continue;
        const std::int64_t at = static_cast<std::int64_t>(token) * p.out + row;
        if constexpr (std::is_same_v<Output, float>) {
          static_cast<float*>(p.y)[at] = sums.total[tokens][i];
        } else {
          static_cast<T*>(p.y)[at] = from_float<T>(sums.total[tokens][i]);
        }
      }
    }
  }
};

}  // namespace adaptrt::cuda::product
