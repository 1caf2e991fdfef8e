#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/cuda/slot_tile.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/warp.h"

namespace adaptrt::cuda {

struct BlockRank {
  std::int32_t before;  ///< true flags of threads before this one
  std::int32_t total;   ///< of the block
};

/// Shared memory that rank_in_block() uses, from the beginning.
[[nodiscard]] constexpr std::size_t rank_bytes(int threads) {
  return static_cast<std::size_t>(threads / kWarpSize) * sizeof(std::int32_t);
}

/// Block: counts the threads' flags.
template <int kThreads>
__device__ inline BlockRank rank_in_block(bool flag) {
  auto* counts = reinterpret_cast<std::int32_t*>(shared_memory());
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::uint32_t mask = __ballot_sync(kAllLanes, flag);
  __syncthreads();  // the previous counts have been read
  if (thread % kWarpSize == 0) counts[thread / kWarpSize] = __popc(mask);
  __syncthreads();
  BlockRank rank{__popc(mask & ((1U << (thread % kWarpSize)) - 1)), 0};
  ADAPTRT_UNROLL
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
    if (warp < thread / kWarpSize) rank.before += counts[warp];
    rank.total += counts[warp];
  }
  return rank;
}

/// Block: numbers the tiles of `slots` slots in order. tiles[i] = tile_of(first slot of tile i); those after
/// the last one, up to `end`, become `rest`. begins_tile(slot) is true for the first slot of a tile. Uses
/// rank_in_block().
template <int kThreads, typename BeginsTile, typename TileOf>
__device__ inline void number_tiles(SlotTile* tiles, std::int32_t end, std::int32_t slots,
                                    const SlotTile& rest, const BeginsTile& begins_tile,
                                    const TileOf& tile_of) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t next = 0;
  for (std::int32_t first = 0; first < slots; first += kThreads) {
    const std::int32_t slot = first + thread;
    const bool begins = slot < slots && begins_tile(slot);
    const BlockRank rank = rank_in_block<kThreads>(begins);
    if (begins) tiles[next + rank.before] = tile_of(slot);
    next += rank.total;
  }
  for (std::int32_t i = next + thread; i < end; i += kThreads) tiles[i] = rest;
}

}  // namespace adaptrt::cuda
