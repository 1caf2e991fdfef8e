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

struct GatedAddStep {
  GatedAdd work;
  rows::RowVectors vectors;
};

/// One vector per thread.
template <typename T>
class GatedAddVectors {
 public:
  using Parameters = GatedAddStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const GatedAddStep& step) {
    const GatedAdd& work = step.work;
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int32_t i = step.vectors.own<kThreads>();
    if (i < 0) return;
    const float logit = work.gate[step.vectors.row(i)];
    const float gate = rows::times_sigmoid(1.0F, logit);
    rows::Elements sum = rows::load<float>(work.stream, i);
    const rows::Elements input = rows::load<T>(work.input, i);
    sum.for_each([&](float value, int at) { return fmaf(gate, input.values[at], value); });
    rows::store<float>(work.stream, i, sum);
  }
};

}  // namespace

void enqueue(const GatedAdd& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("tokens", work.tokens)
      .vectors("width", work.width, 8)
      .done("GatedAdd");
  const rows::RowVectors vectors("tokens", work.tokens, work.width, "GatedAdd");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = GatedAddVectors<T>;
    launch<Kernel>(vectors.shape<Kernel>(), {.work = work, .vectors = vectors}, stream);
  });
}

}  // namespace adaptrt::cuda
