#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

struct GatedColumnsStep {
  const void* gate;
  const float* values;  ///< from the first column on
  void* output;
  std::int32_t count;   ///< vectors of the output
  Divisor width;        ///< vectors of a row of the output
  std::int64_t stride;  ///< vectors of a row of `values`
};

/// One vector of the output per thread.
template <typename T, LinearEpilogue kActivation>
class GatedColumnsVectors {
 public:
  using Parameters = GatedColumnsStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const GatedColumnsStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= step.count) return;
    const auto i = static_cast<std::int32_t>(index);
    rows::Elements gate = rows::load<T>(step.gate, i);
    const rows::Elements values =
        rows::load<float>(step.values, step.width.quotient(i) * step.stride + step.width.remainder(i));
    gate.for_each([&](float value, int at) {
      return rows::activate<kActivation>(value, values.values[at], /*threshold=*/0.0F);
    });
    rows::store<T>(step.output, i, gate);
  }
};

template <LinearEpilogue kActivation>
void launch_activation(const GatedColumns& work, const GatedColumnsStep& step, void* stream) {
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = GatedColumnsVectors<T, kActivation>;
    launch<Kernel>({.x = rows::blocks_for(step.count, Kernel::kThreads), .overlaps_previous = true}, step,
                   stream);
  });
}

}  // namespace

void enqueue(const GatedColumns& work, void* stream) {
  rows::Checks checks;
  checks.type(work.dtype).count("tokens", work.tokens).vectors("width", work.width, 8);
  checks.vectors("stride", work.stride, 8).vectors("first_column", work.first_column, 0);
  checks.condition(work.first_column + work.width <= work.stride, "the columns end after the row");
  checks.done("GatedColumns");
  const std::int64_t count = work.tokens * (work.width / rows::kVector);
  rows::Checks().count("tokens * width / 8", count).done("GatedColumns");
  const GatedColumnsStep step{.gate = work.gate,
                              .values = work.values + work.first_column,
                              .output = work.output,
                              .count = static_cast<std::int32_t>(count),
                              .width = Divisor(static_cast<std::int32_t>(work.width / rows::kVector)),
                              .stride = work.stride / rows::kVector};
  switch (work.activation) {
    case LinearEpilogue::kSiluMul:
      return launch_activation<LinearEpilogue::kSiluMul>(work, step, stream);
    case LinearEpilogue::kGeluMul:
      return launch_activation<LinearEpilogue::kGeluMul>(work, step, stream);
    case LinearEpilogue::kGeluTanhMul:
      return launch_activation<LinearEpilogue::kGeluTanhMul>(work, step, stream);
    default:
      rows::Checks()
          .condition(false, "activation is not kSiluMul, kGeluMul or kGeluTanhMul")
          .done("GatedColumns");
  }
}

}  // namespace adaptrt::cuda
