#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/block_rank.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"

namespace adaptrt::cuda {
namespace {

/// A block finds the slots of one expert. It reads all choices twice: to count those of smaller experts, and
/// to number its own in order.
class Number {
 public:
  using Parameters = NumberSlots;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr std::size_t kSharedBytes = rank_bytes(kThreads);

  __device__ static void run(const NumberSlots& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto expert = static_cast<std::int32_t>(blockIdx.x);
    const auto slots = static_cast<std::int32_t>(work.slots);
    std::int32_t next = 0;
    for (std::int32_t first = 0; first < slots; first += kThreads) {
      const std::int32_t i = first + thread();
      next += rank_in_block<kThreads>(i < slots && work.chosen[i] < expert).total;
    }
    if (thread() == 0) {
      work.offsets[expert] = next;
      if (expert == work.experts - 1) work.offsets[work.experts] = slots;
    }
    for (std::int32_t first = 0; first < slots; first += kThreads) {
      const std::int32_t i = first + thread();
      const bool is_own = i < slots && work.chosen[i] == expert;
      const BlockRank rank = rank_in_block<kThreads>(is_own);
      if (is_own) {
        work.entries[next + rank.before] = i;
        work.slots_of[i] = next + rank.before;
        work.expert_of[next + rank.before] = expert;
      }
      next += rank.total;
    }
  }

 private:
  __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
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
