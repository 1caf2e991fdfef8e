#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/cuda/sparse_kernels.h"
#include "cuda/kernels/block_rank.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/product/portable_kernel.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::product {

/// Address of a neuron's vector of `size` elements.
template <typename T>
__device__ inline const T* find_vector(const NeuronVectors& vectors, int neuron, int size) {
  const std::int32_t slot = vectors.slots[neuron];
  return slot >= 0 ? static_cast<const T*>(vectors.resident) + static_cast<std::int64_t>(slot) * size
                   : static_cast<const T*>(vectors.pinned) + static_cast<std::int64_t>(neuron) * size;
}

/// A thread for each group of neurons.
template <typename T>
class ActiveMasks {
 public:
  struct Parameters {
    const void* gate;
    const float* bias;
    std::uint16_t* masks;
    float threshold;
    int tokens;
    int vectors;  ///< of a row of the gate
  };
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const Parameters& p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto group = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (group >= (p.vectors + 1) / 2) return;
    std::uint32_t mask = find_active(p, 2 * group);
    // The last group may be half a group.
    if (2 * group + 1 < p.vectors) mask |= find_active(p, 2 * group + 1) << rows::kVector;
    p.masks[group] = static_cast<std::uint16_t>(mask);
  }

 private:
  /// Bits of eight neurons.
  __device__ static std::uint32_t find_active(const Parameters& p, int vector) {
    std::uint32_t mask = 0;
    for (int token = 0; token < p.tokens; ++token) {
      rows::Elements gate = rows::load<T>(p.gate, static_cast<std::int64_t>(token) * p.vectors + vector);
      if (p.bias != nullptr) {
        const rows::Elements bias = rows::load_constant<float>(p.bias, vector);
        gate.for_each([&](float value, int i) { return value + bias.values[i]; });
      }
      // NaN is active, as for Finish.
      gate.for_each([&](float value, int i) {
        mask |= value <= p.threshold ? 0U : 1U << i;
        return value;
      });
    }
    return mask;
  }
};

/// The portable product, with zeros in place of the weights of inactive neurons. A block has 64 neurons.
template <typename T>
class ActiveRows {
 public:
  using Product = Portable<T>;
  struct Parameters {
    typename Product::Parameters product;
    const std::uint16_t* masks;
    NeuronVectors rows;
  };
  static constexpr int kThreads = Product::kThreads;
  static constexpr int kBlocksPerMultiprocessor = Product::kBlocksPerMultiprocessor;
  static constexpr std::size_t kSharedBytes = Product::kSharedBytes + Product::kOutputs * sizeof(const T*);

  __device__ static void run(const Parameters& p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    auto** rows = reinterpret_cast<const T**>(shared_memory() + Product::kSharedBytes);
    const int first = static_cast<int>(blockIdx.x) * Product::kOutputs;
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < Product::kOutputs) {
      const int neuron = first + thread;
      const bool is_active =
          neuron < p.product.out && ((p.masks[neuron / kNeuronGroup] >> (neuron % kNeuronGroup)) & 1U) != 0;
      rows[thread] = is_active ? find_vector<T>(p.rows, neuron, p.product.in) : nullptr;
    }
    __syncthreads();
    Product::multiply_tile(
        p.product, 0, [](int token) { return token; }, [&](int neuron) { return rows[neuron - first]; });
  }
};

/// The product whose inputs are neurons. A block computes 64 outputs, 16 per warp, which are the rows of the
/// mma; its columns are the tokens. Columns of active groups of 16 neurons go through shared memory, four
/// groups at a time, in order. A neuron that is not active has zeros there.
template <typename T>
class ActiveColumns {
 public:
  struct Parameters {
    const void* x;  ///< [tokens, neurons]
    const std::uint16_t* masks;
    NeuronVectors columns;
    void* y;  ///< [tokens, out]
    int neurons;
    int out;
    int tokens;
  };
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr int kOutputs = 64;

  /// Shared memory of a block.
  static constexpr std::size_t shared_bytes(std::int64_t neurons) {
    return kStages * kStageElements * sizeof(T) +
           static_cast<std::size_t>(neuron_groups(neurons)) * sizeof(std::uint32_t);
  }

  __device__ static void run(const Parameters& p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    T* buffers = reinterpret_cast<T*>(shared_memory());
    auto* groups = reinterpret_cast<std::uint32_t*>(buffers + kStages * kStageElements);
    const Active active{groups, list_groups(p, groups)};
    const int blocks = (active.count + kGroups - 1) / kGroups;
    for (int block = 0; block < kStages - 1; ++block)
      load(p, buffers + block * kStageElements, active, block);
    float sums[4] = {};
    for (int block = 0; block < blocks; ++block) {
      wait_copies<kStages - 2>();
      // Also protects the stage that is loaded next until all warps have read it.
      __syncthreads();
      const int next = block + kStages - 1;
      load(p, buffers + next % kStages * kStageElements, active, next);
      multiply(sums, buffers + block % kStages * kStageElements);
    }
    store(p, sums);
  }

 private:
  static constexpr int kStages = 4;
  static constexpr int kGroups = 4;  ///< of a stage
  static constexpr int kGroupSize = static_cast<int>(kNeuronGroup);
  static constexpr int kNeurons = kGroups * kGroupSize;
  static constexpr int kTokens = static_cast<int>(kMaxSparseTokens);
  static constexpr int kVector = 8;
  /// Rows are padded by 16 bytes, so that ldmatrix has no bank conflicts.
  static constexpr int kWeightStride = kOutputs + kVector;
  static constexpr int kTokenStride = kNeurons + kVector;
  static constexpr int kStageElements = kNeurons * kWeightStride + kTokens * kTokenStride;

  /// Groups with an active neuron, in order: the group's number, and its mask above.
  struct Active {
    const std::uint32_t* groups;
    int count;
  };

  /// Block: lists the active groups. Returns their number.
  __device__ static int list_groups(const Parameters& p, std::uint32_t* groups) {
    const int all = (p.neurons + kGroupSize - 1) / kGroupSize;
    int count = 0;
    for (int first = 0; first < all; first += kThreads) {
      const int group = first + static_cast<int>(threadIdx.x);
      const std::uint32_t mask = group < all ? p.masks[group] : 0U;
      const BlockRank rank = rank_in_block<kThreads>(mask != 0);
      if (mask != 0) groups[count + rank.before] = static_cast<std::uint32_t>(group) | mask << 16U;
      count += rank.total;
    }
    __syncthreads();
    return count;
  }

  /// Starts copying four groups; zeros for neurons that are not active, and outside of the matrices.
  __device__ static void load(const Parameters& p, T* stage, const Active& active, int block) {
    constexpr int kWeightVectors = kNeurons * (kOutputs / kVector);
    constexpr int kTokenVectors = kTokens * (kNeurons / kVector);
    for (int i = static_cast<int>(threadIdx.x); i < kWeightVectors + kTokenVectors; i += kThreads) {
      if (i < kWeightVectors) {
        const int row = i / (kOutputs / kVector);
        const int column = i % (kOutputs / kVector) * kVector;
        const int output = static_cast<int>(blockIdx.x) * kOutputs + column;
        const int at = block * kGroups + row / kGroupSize;
        const std::uint32_t group = at < active.count ? active.groups[at] : 0U;
        const bool valid = output < p.out && ((group >> (16 + row % kGroupSize)) & 1U) != 0;
        const int neuron = static_cast<int>(group & 0xffffU) * kGroupSize + row % kGroupSize;
        const T* from =
            valid ? find_vector<T>(p.columns, neuron, p.out) + output : static_cast<const T*>(p.x);
        copy_async_16(stage + row * kWeightStride + column, from, valid);
      } else {
        const int row = (i - kWeightVectors) / (kNeurons / kVector);
        const int column = (i - kWeightVectors) % (kNeurons / kVector) * kVector;
        const int at = block * kGroups + column / kGroupSize;
        const std::uint32_t group = at < active.count ? active.groups[at] : 0U;
        const int neuron = static_cast<int>(group & 0xffffU) * kGroupSize + column % kGroupSize;
        const bool valid = row < p.tokens && at < active.count && neuron < p.neurons;
        const T* x = static_cast<const T*>(p.x);
        const T* from = valid ? x + static_cast<std::int64_t>(row) * p.neurons + neuron : x;
        copy_async_16(stage + kNeurons * kWeightStride + row * kTokenStride + column, from, valid);
      }
    }
    commit_copies();
  }

  __device__ static void multiply(float (&sums)[4], const T* stage) {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize;
    const int lane = thread % kWarpSize;
    const T* weights = stage + (lane / 16 * 8 + lane % 8) * kWeightStride + warp * 16 + lane / 8 % 2 * 8;
    const T* x = stage + kNeurons * kWeightStride + lane % 8 * kTokenStride + lane / 8 * 8;
    ADAPTRT_UNROLL
    for (int neuron = 0; neuron < kNeurons; neuron += 2 * kGroupSize) {
      std::uint32_t b[4];
      load_matrix_x4(b, x + neuron);
      ADAPTRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4];
        load_matrix_x4_transposed(a, weights + (neuron + half * kGroupSize) * kWeightStride);
        const std::uint32_t of_half[2] = {b[2 * half], b[2 * half + 1]};
        mma_16x8x16<T>(sums, a, of_half);
      }
    }
  }

  __device__ static void store(const Parameters& p, const float (&sums)[4]) {
    const int thread = static_cast<int>(threadIdx.x);
    const int output =
        static_cast<int>(blockIdx.x) * kOutputs + thread / kWarpSize * 16 + thread % kWarpSize / 4;
    ADAPTRT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = output + i / 2 * 8;
      const int token = thread % 4 * 2 + i % 2;
      if (row < p.out && token < p.tokens) {
        static_cast<T*>(p.y)[static_cast<std::int64_t>(token) * p.out + row] = from_float<T>(sums[i]);
      }
    }
  }
};

}  // namespace adaptrt::cuda::product
