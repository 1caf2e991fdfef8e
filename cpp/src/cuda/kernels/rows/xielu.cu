#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

/// One vector per thread.
template <typename T>
class XieluVectors {
 public:
  using Parameters = Xielu;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const Xielu& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= work.elements / rows::kVector) return;
    const XieluCoefficients& by = work.coefficients;
    rows::Elements elements = rows::load<T>(work.input, i);
    elements.for_each([&](float x, int) {
      // NaN stays NaN.
      const float curve =
          x > 0.0F ? by.positive * x * x : by.negative * (expm1f(x > by.bound ? by.bound : x) - x);
      return curve + by.linear * x;
    });
    rows::store<T>(work.output, i, elements);
  }
};

}  // namespace

void enqueue(const Xielu& work, void* stream) {
  constexpr std::int64_t kMaxElements = rows::kMaxBlocks * rows::kVector;
  rows::Checks().type(work.dtype).vectors("elements", work.elements, 0, kMaxElements).done("Xielu");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = XieluVectors<T>;
    launch<Kernel>(
        {.x = rows::blocks_for(work.elements / rows::kVector, Kernel::kThreads), .overlaps_previous = true},
        work, stream);
  });
}

}  // namespace adaptrt::cuda
