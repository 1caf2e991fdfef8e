#include <algorithm>
#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/warp.h"

namespace adaptrt::cuda {
namespace {

struct TileStep {
  NumberTiles work;
  Divisor top_k;
};

/// One block numbers all beginnings of tiles, in order.
class Tiles {
 public:
  using Parameters = TileStep;
  static constexpr int kThreads = 1024;
  static constexpr int kBlocksPerMultiprocessor = 1;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr std::size_t kSharedBytes = kWarps * sizeof(std::int32_t);

  __device__ static void run(const TileStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const NumberTiles& work = step.work;
    auto* counts = reinterpret_cast<std::int32_t*>(shared_memory());
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const auto slots = static_cast<std::int32_t>(work.slots);
    std::int32_t next = 0;
    for (std::int32_t first = 0; first < slots; first += kThreads) {
      const std::int32_t slot = first + thread;
      const bool begins = slot < slots && begins_tile(step, slot);
      const std::uint32_t mask = __ballot_sync(kAllLanes, begins);
      __syncthreads();  // the previous counts have been read
      if (thread % kWarpSize == 0) counts[thread / kWarpSize] = __popc(mask);
      __syncthreads();
      std::int32_t place = next + __popc(mask & ((1U << (thread % kWarpSize)) - 1));
      for (int warp = 0; warp < kWarps; ++warp) {
        if (warp < thread / kWarpSize) place += counts[warp];
        next += counts[warp];
      }
      if (begins) work.tiles[place] = {slot, adapter_of(step, slot), work.expert_of[slot]};
    }
    const auto end = static_cast<std::int32_t>(work.max_tiles);
    for (std::int32_t i = next + thread; i <= end; i += kThreads) work.tiles[i] = {slots, -1, 0};
  }

 private:
  __device__ static std::int32_t adapter_of(const TileStep& step, std::int32_t slot) {
    return step.work.token_slots[step.top_k.quotient(step.work.entries[slot])];
  }

  __device__ static bool begins_tile(const TileStep& step, std::int32_t slot) {
    return slot % step.work.tile_slots == 0 || step.work.expert_of[slot] != step.work.expert_of[slot - 1] ||
           adapter_of(step, slot) != adapter_of(step, slot - 1);
  }
};

}  // namespace

void enqueue(const NumberTiles& work, void* stream) {
  rows::Checks()
      .count("slots", work.slots)
      .positive("top_k", work.top_k, kMaxTopK)
      .positive("tile_slots", work.tile_slots)
      .count("max_tiles", work.max_tiles)
      .done("NumberTiles");
  if (work.slots == 0) return;
  launch<Tiles>({.shared_bytes = Tiles::kSharedBytes, .overlaps_previous = true},
                {.work = work, .top_k = Divisor(work.top_k)}, stream);
}

std::int64_t most_tiles(std::int64_t slots, std::int64_t experts, std::int64_t ranges,
                        std::int32_t tile_slots) {
  return std::min(slots, (slots + tile_slots - 1) / tile_slots + experts * ranges);
}

}  // namespace adaptrt::cuda
