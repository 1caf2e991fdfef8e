#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

struct SumStep {
  SumSlots work;
  std::int32_t count;  ///< vectors of the output
  Divisor width;       ///< vectors of a row
};

/// One vector of the output per thread.
template <typename T>
class SumVectors {
 public:
  using Parameters = SumStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const SumStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= step.count) return;
    const auto i = static_cast<std::int32_t>(index);
    const std::int64_t first = std::int64_t{step.width.quotient(i)} * step.work.top_k;
    const std::int32_t column = step.width.remainder(i);
    rows::Elements sum{};
    for (std::int32_t k = 0; k < step.work.top_k; ++k) {
      const float weight = step.work.weights[first + k];
      const std::int64_t row = step.work.slots_of[first + k];
      rows::Elements y = rows::load<T>(step.work.y, row * step.width.value() + column);
      if (step.work.bias != nullptr) {
        const std::int64_t of_bias = std::int64_t{step.work.chosen[first + k]} * step.width.value();
        const rows::Elements bias = rows::load_constant<float>(step.work.bias, of_bias + column);
        y.for_each([&](float value, int at) { return value + bias.values[at]; });
      }
      sum.for_each([&](float value, int at) { return fmaf(weight, y.values[at], value); });
    }
    if (step.work.adds) {
      const rows::Elements before = rows::load<float>(step.work.output, i);
      sum.for_each([&](float value, int at) { return before.values[at] + value; });
    }
    rows::store<float>(step.work.output, i, sum);
  }
};

}  // namespace

void enqueue(const SumSlots& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("tokens", work.tokens)
      .positive("top_k", work.top_k, kMaxTopK)
      .vectors("width", work.width, 8)
      .done("SumSlots");
  const std::int64_t count = work.tokens * (work.width / rows::kVector);
  rows::Checks().count("tokens * width / 8", count).done("SumSlots");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = SumVectors<T>;
    launch<Kernel>({.x = rows::blocks_for(count, Kernel::kThreads), .overlaps_previous = true},
                   {.work = work,
                    .count = static_cast<std::int32_t>(count),
                    .width = Divisor(static_cast<std::int32_t>(work.width / rows::kVector))},
                   stream);
  });
}

}  // namespace adaptrt::cuda
