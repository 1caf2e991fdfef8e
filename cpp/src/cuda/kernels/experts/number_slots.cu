#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/warp.h"

namespace adaptrt::cuda {
namespace {

/// A block finds the slots of one expert. It reads all choices twice: to count those of smaller experts, and
/// to number its own in order.
class Number {
 public:
  using Parameters = NumberSlots;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr std::size_t kSharedBytes = kWarps * sizeof(std::int32_t);

  __device__ static void run(const NumberSlots& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto expert = static_cast<std::int32_t>(blockIdx.x);
    const auto slots = static_cast<std::int32_t>(work.slots);
    std::int32_t next = 0;
    for (std::int32_t first = 0; first < slots; first += kThreads) {
      const std::int32_t i = first + thread();
      next += ranked(i < slots && work.chosen[i] < expert).total;
    }
    if (thread() == 0) {
      work.offsets[expert] = next;
      if (expert == work.experts - 1) work.offsets[work.experts] = slots;
    }
    for (std::int32_t first = 0; first < slots; first += kThreads) {
      const std::int32_t i = first + thread();
      const bool is_own = i < slots && work.chosen[i] == expert;
      const Rank rank = ranked(is_own);
      if (is_own) {
        work.entries[next + rank.before] = i;
        work.slots_of[i] = next + rank.before;
        work.expert_of[next + rank.before] = expert;
      }
      next += rank.total;
    }
  }

 private:
  struct Rank {
    std::int32_t before;  ///< true flags of threads before this one
    std::int32_t total;   ///< of the block
  };

  __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }

  /// All threads of the block: counts their flags.
  __device__ static Rank ranked(bool flag) {
    auto* counts = reinterpret_cast<std::int32_t*>(shared_memory());
    const std::int32_t lane = thread() % kWarpSize;
    const std::uint32_t mask = __ballot_sync(kAllLanes, flag);
    __syncthreads();  // the previous counts have been read
    if (lane == 0) counts[thread() / kWarpSize] = __popc(mask);
    __syncthreads();
    Rank rank{__popc(mask & ((1U << lane) - 1)), 0};
    ADAPTRT_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < thread() / kWarpSize) rank.before += counts[warp];
      rank.total += counts[warp];
    }
    return rank;
  }
};

}  // namespace

void enqueue(const NumberSlots& work, void* stream) {
  rows::Checks()
      .count("slots", work.slots)
      .positive("experts", work.experts, kMaxExperts)
      .done("NumberSlots");
  if (work.slots == 0) return;
  launch<Number>({.x = static_cast<std::uint32_t>(work.experts),
                  .shared_bytes = Number::kSharedBytes,
                  .overlaps_previous = true},
                 work, stream);
}

}  // namespace adaptrt::cuda
