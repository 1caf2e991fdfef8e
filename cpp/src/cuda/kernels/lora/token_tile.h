#pragma once

#include <cstdint>

#include "cuda/kernels/lora/step.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"

namespace adaptrt::cuda::lora {

/// Shared memory that find_token_tile needs.
struct TileSearch {
  int boundaries_of_warp[32];
  int starts[2];  ///< of this tile and of the next one
  int below[2];   ///< number of boundaries before each of them
  int slot;
};

/// Maximum number of tiles of a step, for computing the grid on the host; see find_token_tile.
inline std::int64_t max_token_tiles(std::int64_t tokens, std::int64_t sequences, std::int64_t tile) {
  return (tokens + tile - 1) / tile + sequences + 1;
}

/// Tile number `index` of a step with tiles. They were written by an earlier kernel.
__device__ inline TokenTile read_slot_tile(const Step& step, int index) {
  wait_for_previous_kernel();
  const SlotTile tile = step.tiles[index];
  return {tile.first, step.tiles[index + 1].first - tile.first, tile.adapter_slot, tile.expert};
}

/// Tile number `index` of a step. A tile begins at every multiple of step.tile, and wherever the slot
/// changes. So consecutive sequences with the same slot share tiles, and no tile has more than one slot. All
/// threads of the block must call it; without step.tiles, it ends with a barrier.
__device__ inline TokenTile find_token_tile(const Step& step, int index, TileSearch& shared) {
  if (step.tiles != nullptr) return read_slot_tile(step, index);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int lane = thread % kWarpSize;
  if (thread < 2) {
    shared.starts[thread] = -1;
    shared.below[thread] = 0;
  }
  if (thread == 0) shared.slot = -1;
  __syncthreads();
  // Tiles that begin inside a step.tile-aligned window, at a change of slot, are counted in the order of the
  // sequences. Tiles at the beginnings of windows come between them.
  int earlier = 0;
  for (int chunk = 0; chunk <= step.sequences; chunk += threads) {
    const int sequence = chunk + thread;
    bool begins_tile = false;
    int first = 0;
    // All loads are independent, because their latency delays the loads of the weights.
    if (sequence < step.sequences) {
      const int previous = sequence > 0 ? sequence - 1 : 0;
      first = step.sequence_offsets[sequence];
      const int end = step.sequence_offsets[sequence + 1];
      const int previous_first = step.sequence_offsets[previous];
      const int slot = step.adapter_slots[sequence];
      const int previous_slot = step.adapter_slots[previous];
      const bool continues_run = slot == previous_slot && previous_first != first;
      begins_tile = first % step.tile != 0 && end > first && !continues_run;
    } else if (sequence == step.sequences) {
      first = step.sequence_offsets[sequence];
      begins_tile = first % step.tile != 0 && first < step.tokens;
    }
    const std::uint32_t votes = __ballot_sync(kAllLanes, begins_tile);
    if (lane == 0) shared.boundaries_of_warp[thread / kWarpSize] = __popc(votes);
    __syncthreads();
    int before = earlier + __popc(votes & ((1U << lane) - 1U));
    for (int warp = 0; warp < threads / kWarpSize; ++warp) {
      if (warp < thread / kWarpSize) before += shared.boundaries_of_warp[warp];
      earlier += shared.boundaries_of_warp[warp];
    }
    if (begins_tile) {
      const int number = before + first / step.tile + 1;
      for (int i = 0; i < 2; ++i) {
        if (number == index + i) shared.starts[i] = first;
        if (number < index + i) atomicAdd(&shared.below[i], 1);
      }
    }
    __syncthreads();
  }
  int bounds[2];
  for (int i = 0; i < 2; ++i) {
    const int start = shared.starts[i] >= 0 ? shared.starts[i] : (index + i - shared.below[i]) * step.tile;
    bounds[i] = start < step.tokens ? start : step.tokens;
  }
  for (int sequence = thread; sequence < step.sequences; sequence += threads) {
    if (step.sequence_offsets[sequence] <= bounds[0] && bounds[0] < step.sequence_offsets[sequence + 1]) {
      shared.slot = step.adapter_slots[sequence];
    }
  }
  __syncthreads();
  return {bounds[0], bounds[1] - bounds[0], shared.slot, 0};
}

}  // namespace adaptrt::cuda::lora
