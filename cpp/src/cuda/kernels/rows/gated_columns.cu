#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/rows/row_vectors.h"

namespace adaptrt::cuda {
namespace {

struct GatedColumnsStep {
  const void* gate;
  const float* values;  ///< from the first column on
  void* output;
  rows::RowVectors vectors;  ///< of the output
  std::int64_t stride;       ///< vectors of a row of `values`
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
    const std::int32_t i = step.vectors.own<kThreads>();
    if (i < 0) return;
    rows::Elements gate = rows::load<T>(step.gate, i);
    const rows::Elements values =
        rows::load<float>(step.values, step.vectors.row(i) * step.stride + step.vectors.column(i));
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
    launch<Kernel>(step.vectors.shape<Kernel>(), step, stream);
  });
}

}  // namespace

void enqueue(const GatedColumns& work, void* stream) {
  rows::Checks checks;
  checks.type(work.dtype).count("tokens", work.tokens).vectors("width", work.width, 8);
  checks.vectors("stride", work.stride, 8).vectors("first_column", work.first_column, 0);
  checks.condition(work.first_column + work.width <= work.stride, "the columns end after the row");
  checks.done("GatedColumns");
  const GatedColumnsStep step{.gate = work.gate,
                              .values = work.values + work.first_column,
                              .output = work.output,
                              .vectors = {"tokens", work.tokens, work.width, "GatedColumns"},
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
