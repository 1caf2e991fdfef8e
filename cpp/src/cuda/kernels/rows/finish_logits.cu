#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

struct FinishLogitsStep {
  FinishLogits work;
  Divisor width;  ///< vectors of a row, with a bias
};

/// One vector per thread; without a bias the last one may be incomplete.
class FinishLogitsVectors {
 public:
  using Parameters = FinishLogitsStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const FinishLogitsStep& step) {
    const FinishLogits& work = step.work;
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const std::int64_t complete = work.elements / rows::kVector;
    if (i < complete) {
      rows::Elements logits = rows::load<float>(work.logits, i);
      if (work.bias != nullptr) {
        const std::int32_t column = step.width.remainder(static_cast<std::int32_t>(i));
        const rows::Elements bias = rows::load_constant<float>(work.bias, column);
        logits.for_each([&](float value, int at) { return value + bias.values[at]; });
      }
      logits.for_each([&](float value, int) { return finished(work, value); });
      rows::store<float>(work.logits, i, logits);
    } else if (i == complete) {
      for (std::int64_t at = i * rows::kVector; at < work.elements; ++at) {
        work.logits[at] = finished(work, work.logits[at]);
      }
    }
  }

 private:
  __device__ static float finished(const FinishLogits& work, float logit) {
    const float scaled = logit * work.scale;
    return work.softcap == 0.0F ? scaled : rows::bounded(scaled, work.softcap);
  }
};

}  // namespace

void enqueue(const FinishLogits& work, void* stream) {
  using Kernel = FinishLogitsVectors;
  rows::Checks checks;
  checks.count("elements", work.elements, rows::kMaxBlocks * rows::kVector);
  if (work.bias != nullptr) checks.vectors("width", work.width, 8);
  checks.done("FinishLogits");
  const std::int64_t vectors = work.bias == nullptr ? 1 : work.width / rows::kVector;
  launch<Kernel>(
      {.x = rows::blocks_for(work.elements, Kernel::kThreads * rows::kVector), .overlaps_previous = true},
      {.work = work, .width = Divisor(static_cast<std::int32_t>(vectors))}, stream);
}

}  // namespace adaptrt::cuda
