#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/rows/row_vectors.h"

namespace adaptrt::cuda {
namespace {

struct SumStep {
  SumSlots work;
  rows::RowVectors vectors;  ///< of the output
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
    const std::int32_t i = step.vectors.own<kThreads>();
    if (i < 0) return;
    const std::int64_t first = std::int64_t{step.vectors.row(i)} * step.work.top_k;
    const std::int32_t column = step.vectors.column(i);
    rows::Elements sum{};
    for (std::int32_t k = 0; k < step.work.top_k; ++k) {
      const float weight = step.work.weights == nullptr ? 1.0F : step.work.weights[first + k];
      const std::int64_t row = step.work.slots_of[first + k];
      rows::Elements y = rows::load<T>(step.work.y, row * step.vectors.width() + column);
      if (step.work.bias != nullptr) {
        const std::int64_t of_bias = std::int64_t{step.work.chosen[first + k]} * step.vectors.width();
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
  const rows::RowVectors vectors("tokens", work.tokens, work.width, "SumSlots");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = SumVectors<T>;
    launch<Kernel>(vectors.shape<Kernel>(), {.work = work, .vectors = vectors}, stream);
  });
}

}  // namespace adaptrt::cuda
