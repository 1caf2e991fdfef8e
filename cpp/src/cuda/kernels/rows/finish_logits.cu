#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

__device__ inline float finished(float logit, float scale, float softcap) {
  const float scaled = logit * scale;
  return softcap == 0.0F ? scaled : rows::bounded(scaled, softcap);
}

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
      logits.for_each([&](float value, int) { return finished(value, work.scale, work.softcap); });
      rows::store<float>(work.logits, i, logits);
    } else if (i == complete) {
      for (std::int64_t at = i * rows::kVector; at < work.elements; ++at) {
        work.logits[at] = finished(work.logits[at], work.scale, work.softcap);
      }
    }
  }
};

struct FinishPaddedLogitsStep {
  FinishPaddedLogits work;
  std::int32_t count;  ///< logits of all rows
  Divisor width;
};

/// One element per thread.
class FinishPaddedElements {
 public:
  using Parameters = FinishPaddedLogitsStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const FinishPaddedLogitsStep& step) {
    const FinishPaddedLogits& work = step.work;
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= step.count) return;
    const auto i = static_cast<std::int32_t>(index);
    const std::int32_t row = step.width.quotient(i);
    const std::int32_t column = i - row * step.width.value();
    float logit = work.input[row * work.stride + column];
    if (work.bias != nullptr) logit += work.bias[column];
    const std::int64_t to = std::int64_t{row} * work.logits_stride + column;
    work.logits[to] = finished(logit, work.scale, work.softcap);
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

void enqueue(const FinishPaddedLogits& work, void* stream) {
  using Kernel = FinishPaddedElements;
  rows::Checks checks;
  checks.count("rows", work.rows).positive("width", work.width);
  checks.condition(work.stride >= work.width, "stride is below width");
  checks.condition(work.logits_stride >= work.width, "logits_stride is below width")
      .done("FinishPaddedLogits");
  const std::int64_t count = work.rows * work.width;
  rows::Checks().count("rows * width", count).done("FinishPaddedLogits");
  launch<Kernel>({.x = rows::blocks_for(count, Kernel::kThreads), .overlaps_previous = true},
                 {.work = work,
                  .count = static_cast<std::int32_t>(count),
                  .width = Divisor(static_cast<std::int32_t>(work.width))},
                 stream);
}

}  // namespace adaptrt::cuda
