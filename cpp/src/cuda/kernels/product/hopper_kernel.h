#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/hopper/ptx.h"
#include "cuda/kernels/hopper/wgmma.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/product/tiles.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::product {

/// The product with wgmma, for compute capability 9.0. Outputs are the instruction's 64 rows, tokens its
/// columns.
///
/// Grid: x one block per multiprocessor, or fewer; each computes one tile after another. One thread loads
/// stages of weights and x into shared memory with the copy engine (TMA), and prefetches the next tile's.
/// Each warpgroup multiplies 64 outputs. It stores them through shared memory, or directly if `Output` is
/// float instead of T.
template <typename T, std::size_t kTile, typename Output = T>
class Hopper {
 public:
  static constexpr Tile kShape = kTiles[kTile];

  static constexpr bool kIsRounded = std::is_same_v<Output, T>;

  struct Parameters {
    CUtensorMap weights;  ///< [out, in], boxes of kShape.outputs() x kColumns
    CUtensorMap x;        ///< [tokens, in], boxes of kShape.tokens x kColumns
    /// [tokens, out]; a map has boxes of kStoredTokens x kOutputs.
    std::conditional_t<kIsRounded, CUtensorMap, float*> y;
    int in;
    int out;
    int tokens;
  };

  static constexpr int kColumns = 64;
  static constexpr int kOutputs = 64;
  /// Number of tokens that are stored through shared memory at a time.
  static constexpr int kStoredTokens = kShape.tokens < 128 ? kShape.tokens : 128;
  /// Registers can only be moved between warpgroups.
  static constexpr bool kMovesRegisters = kShape.warpgroups > 1;
  static constexpr int kThreads = kShape.warpgroups * 128 + (kMovesRegisters ? 128 : kWarpSize);
  static constexpr int kBlocksPerMultiprocessor = 1;

 private:
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
  static constexpr int kWeightBytes = kShape.outputs() * kRowBytes;
  static constexpr int kXBytes = kShape.tokens * kRowBytes;
  static constexpr int kStageBytes = kShape.steps * (kWeightBytes + kXBytes);
  static constexpr int kStoreBytes = kIsRounded ? kStoredTokens * kRowBytes : 0;
  static constexpr int kSwizzleBytes = 1024;
  static constexpr int kBarrierBytes = 8;
  /// Number of adjacent token tiles per group. The tiles of a group share weights and run at the same time.
  static constexpr int kTokenTilesOfGroup = 8;

 public:
  static constexpr std::size_t kSharedBytes =
      kSwizzleBytes + kShape.stages * (kStageBytes + 2 * kBarrierBytes) + kShape.warpgroups * kStoreBytes;
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");

  static __device__ void run(const Parameters& p) {
    const Buffers buffers = find_buffers();
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kShape.stages; ++stage) {
        init_barrier(buffers.full(stage), 1);
        init_barrier(buffers.empty(stage), kShape.warpgroups);
      }
      fence_barrier_init();
    }
    __syncthreads();
    // Tells the compiler that the value is the same in all threads of a warp.
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == kShape.warpgroups) {
      if constexpr (kMovesRegisters) release_registers<24>();
      if (threadIdx.x == kShape.warpgroups * 128) load(p, buffers);
    } else {
      if constexpr (kMovesRegisters) take_registers<kShape.warpgroups == 2 ? 240 : 160>();
      multiply(p, buffers, warpgroup);
    }
  }

 private:
  /// Addresses in shared memory.
  struct Buffers {
    std::uint32_t stages;
    [[nodiscard]] __device__ std::uint32_t weights(int stage, int step) const {
      return stages + stage * kStageBytes + step * kWeightBytes;
    }
    [[nodiscard]] __device__ std::uint32_t x(int stage, int step) const {
      return weights(stage, kShape.steps) + step * kXBytes;
    }
    [[nodiscard]] __device__ std::uint32_t stored(int warpgroup) const {
      return stages + kShape.stages * kStageBytes + warpgroup * kStoreBytes;
    }
    [[nodiscard]] __device__ std::uint32_t full(int stage) const {
      return stored(kShape.warpgroups) + stage * kBarrierBytes;
    }
    [[nodiscard]] __device__ std::uint32_t empty(int stage) const { return full(kShape.stages + stage); }
  };

  /// Index of the next stage, and its phase's parity.
  struct Position {
    int stage = 0;
    std::uint32_t parity = 0;
    __device__ void advance() {
      if (++stage == kShape.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  struct Corner {
    int output;
    int token;
  };

  static __device__ Buffers find_buffers() {
    const std::uint32_t begin = detail::shared_address(shared_memory());
    return {(begin + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes};
  }

  static __device__ int output_tiles(const Parameters& p) {
    return static_cast<int>(divide_up(p.out, kShape.outputs()));
  }
  static __device__ int token_tiles(const Parameters& p) {
    return static_cast<int>(divide_up(p.tokens, kShape.tokens));
  }
  static __device__ int stages_of_tile(const Parameters& p) {
    return (p.in + kShape.steps * kColumns - 1) / (kShape.steps * kColumns);
  }

  static __device__ Corner corner_of(const Parameters& p, int tile) {
    const int tiles_of_group = kTokenTilesOfGroup * output_tiles(p);
    const int first = tile / tiles_of_group * kTokenTilesOfGroup;
    const int in_group = tile % tiles_of_group;
    const int size = min(kTokenTilesOfGroup, token_tiles(p) - first);
    return {in_group / size * kShape.outputs(), (first + in_group % size) * kShape.tokens};
  }

  static __device__ void load_weights(const Parameters& p, const Buffers& buffers, int stage, int block,
                                      int output) {
    // With few tokens, weights are read only once per step, so they are evicted first from the L2 cache.
    const auto policy = p.tokens <= kShape.tokens ? CachePolicy::kEvictFirst : CachePolicy::kNormal;
    arrive_and_expect(buffers.full(stage), kStageBytes);
    for (int step = 0; step < kShape.steps; ++step) {
      copy_box(buffers.weights(stage, step), &p.weights, buffers.full(stage),
               (block * kShape.steps + step) * kColumns, output, policy);
    }
  }

  /// Called by one thread: loads the stages of all tiles.
  static __device__ void load(const Parameters& p, const Buffers& buffers) {
    const int tiles = output_tiles(p) * token_tiles(p);
    const int blocks = stages_of_tile(p);
    const int first = static_cast<int>(blockIdx.x);
    allow_next_kernel();
    // No kernel in the stream writes weights, so the first stages need not wait.
    const int prefetched = min(kShape.stages, blocks);
    const int first_output = corner_of(p, first).output;
    for (int block = 0; block < prefetched; ++block) load_weights(p, buffers, block, block, first_output);
    wait_for_previous_kernel();
    Position at{.stage = 0, .parity = 1};
    for (int tile = first; tile < tiles; tile += static_cast<int>(gridDim.x)) {
      const Corner corner = corner_of(p, tile);
      for (int block = 0; block < blocks; ++block) {
        if (tile != first || block >= prefetched) {
          wait(buffers.empty(at.stage), at.parity);
          load_weights(p, buffers, at.stage, block, corner.output);
        }
        for (int step = 0; step < kShape.steps; ++step) {
          copy_box(buffers.x(at.stage, step), &p.x, buffers.full(at.stage),
                   (block * kShape.steps + step) * kColumns, corner.token, CachePolicy::kNormal);
        }
        at.advance();
      }
    }
  }

  /// Called by a warpgroup: multiplies and stores its outputs of all tiles.
  static __device__ void multiply(const Parameters& p, const Buffers& buffers, int warpgroup) {
    const int tiles = output_tiles(p) * token_tiles(p);
    const int blocks = stages_of_tile(p);
    const bool leads = threadIdx.x % 128 == 0;
    float sums[kShape.tokens / 2];
    Position at;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
      int previous = -1;
      for (int block = 0; block < blocks; ++block) {
        wait(buffers.full(at.stage), at.parity);
        const std::uint32_t weights = buffers.weights(at.stage, 0) + warpgroup * kOutputs * kRowBytes;
        wgmma_fence();
        ADAPTRT_UNROLL
        for (int step = 0; step < kShape.steps; ++step) {
          ADAPTRT_UNROLL
          for (int column = 0; column < kColumns; column += 16) {
            const int skipped = column * static_cast<int>(sizeof(T));
            Wgmma<T, kShape.tokens>::run(sums, matrix_descriptor(weights + step * kWeightBytes + skipped),
                                         matrix_descriptor(buffers.x(at.stage, step) + skipped),
                                         block + step + column > 0);
          }
        }
        wgmma_commit();
        // At most one group is still running, so the products of the previous stage are complete.
        wgmma_wait<1>();
        if (leads && previous >= 0) arrive(buffers.empty(previous));
        previous = at.stage;
        at.advance();
      }
      wgmma_wait<0>();
      keep_behind_wait(sums);
      if (leads) arrive(buffers.empty(previous));
      const Corner corner = corner_of(p, tile);
      const Corner own = {corner.output + warpgroup * kOutputs, corner.token};
      if constexpr (kIsRounded) {
        store(p, sums, buffers.stored(warpgroup), warpgroup, own);
      } else {
        store_directly(p, sums, own);
      }
    }
    if (kIsRounded && leads) wait_stores();
  }

  /// Stores sums from registers. The threads that hold neighbouring outputs of a token write 32 bytes at
  /// once.
  static __device__ void store_directly(const Parameters& p, const float (&sums)[kShape.tokens / 2],
                                        Corner corner) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int lane = thread % kWarpSize;
    const int output = corner.output + thread / kWarpSize * 16 + lane / 4;
    const int first_token = corner.token + lane % 4 * 2;
    const bool has_first = output < p.out;
    const bool has_second = output + 8 < p.out;
    float* y = p.y + static_cast<std::int64_t>(first_token) * p.out + output;
    ADAPTRT_UNROLL
    for (int i = 0; i < kShape.tokens / 4; ++i) {
      // Tokens 0 and 1, then 8 and 9, ...
      const int token = i / 2 * 8 + i % 2;
      if (first_token + token >= p.tokens) continue;
      float* of_token = y + static_cast<std::int64_t>(token) * p.out;
      if (has_first) of_token[0] = sums[i / 2 * 4 + i % 2];
      if (has_second) of_token[8] = sums[i / 2 * 4 + 2 + i % 2];
    }
  }

  static __device__ void store(const Parameters& p, const float (&sums)[kShape.tokens / 2],
                               std::uint32_t shared, int warpgroup, Corner corner) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int lane = thread % kWarpSize;
    const int row = lane % 8;
    // A row of shared memory holds a token's 64 outputs, in the copy engine's swizzle of 16-byte vectors.
    const int vector = thread / kWarpSize * 2 + lane / 8 % 2;
    const std::uint32_t lane_address = shared + row * kRowBytes + (vector ^ row) * 16;
    ADAPTRT_UNROLL
    for (int first = 0; first < kShape.tokens; first += kStoredTokens) {
      if (thread == 0) wait_stores_read();
      warpgroup_barrier(warpgroup);
      if constexpr (kShape.tokens == 8) {
        store_matrix_x2_transposed(lane_address,
                                   {pack_pair<T>(sums[0], sums[1]), pack_pair<T>(sums[2], sums[3])});
      } else {
        ADAPTRT_UNROLL
        for (int tokens = 0; tokens < kStoredTokens; tokens += 16) {
          const float* sum = sums + (first + tokens) / 2;
          store_matrix_x4_transposed(lane_address + (tokens + lane / 16 * 8) * kRowBytes,
                                     {pack_pair<T>(sum[0], sum[1]), pack_pair<T>(sum[2], sum[3]),
                                      pack_pair<T>(sum[4], sum[5]), pack_pair<T>(sum[6], sum[7])});
        }
      }
      fence_for_copy_engine();
      warpgroup_barrier(warpgroup);
      if (thread == 0 && corner.output < p.out && corner.token + first < p.tokens) {
        store_box(&p.y, shared, corner.output, corner.token + first);
      }
    }
  }
};

}  // namespace adaptrt::cuda::product
