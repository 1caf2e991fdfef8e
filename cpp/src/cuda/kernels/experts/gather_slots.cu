#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

struct GatherStep {
  GatherSlots work;
  std::int32_t count;  ///< vectors of y
  Divisor width;       ///< vectors of a row
  Divisor entries_per_row;
};

/// One vector of y per thread.
class GatherVectors {
 public:
  using Parameters = GatherStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const GatherStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= step.count) return;
    const auto i = static_cast<std::int32_t>(index);
    const std::int32_t entry = step.work.entries[step.width.quotient(i)];
    const std::int64_t row = step.entries_per_row.quotient(entry);
    static_cast<Vector16*>(step.work.y)[i] =
        static_cast<const Vector16*>(step.work.x)[row * step.width.value() + step.width.remainder(i)];
  }
};

}  // namespace

void enqueue(const GatherSlots& work, void* stream) {
  rows::Checks()
      .count("slots", work.slots)
      .vectors("width", work.width, 8)
      .positive("entries_per_row", work.entries_per_row)
      .done("GatherSlots");
  const std::int64_t count = work.slots * (work.width / rows::kVector);
  rows::Checks().count("slots * width / 8", count).done("GatherSlots");
  launch<GatherVectors>({.x = rows::blocks_for(count, GatherVectors::kThreads), .overlaps_previous = true},
                        {.work = work,
                         .count = static_cast<std::int32_t>(count),
                         .width = Divisor(static_cast<std::int32_t>(work.width / rows::kVector)),
                         .entries_per_row = Divisor(work.entries_per_row)},
                        stream);
}

}  // namespace adaptrt::cuda
