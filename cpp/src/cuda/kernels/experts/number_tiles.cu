#include <algorithm>
#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/block_rank.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"

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
  static constexpr std::size_t kSharedBytes = rank_bytes(kThreads);

  __device__ static void run(const TileStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const NumberTiles& work = step.work;
    const auto slots = static_cast<std::int32_t>(work.slots);
    number_tiles<kThreads>(
        work.tiles, static_cast<std::int32_t>(work.max_tiles) + 1, slots, {slots, -1, 0},
        [&](std::int32_t slot) { return begins_tile(step, slot); },
        [&](std::int32_t slot) { return SlotTile{slot, adapter_of(step, slot), work.expert_of[slot]}; });
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
