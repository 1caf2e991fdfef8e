#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

/// One vector per thread; the last one may be incomplete.
class FinishLogitsVectors {
 public:
  using Parameters = FinishLogits;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const FinishLogits& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const std::int64_t complete = work.elements / rows::kVector;
    if (i < complete) {
      rows::Elements logits = rows::load<float>(work.logits, i);
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
  rows::Checks().count("elements", work.elements, rows::kMaxBlocks * rows::kVector).done("FinishLogits");
  launch<Kernel>(
      {.x = rows::blocks_for(work.elements, Kernel::kThreads * rows::kVector), .overlaps_previous = true},
      work, stream);
}

}  // namespace adaptrt::cuda
