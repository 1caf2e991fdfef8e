#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/rows/row_vectors.h"

namespace adaptrt::cuda {
namespace {

struct GatherStep {
  GatherSlots work;
  rows::RowVectors vectors;  ///< of y
  Divisor entries_per_row;
};

/// One vector of y per thread.
template <typename T>
class GatherVectors {
 public:
  using Parameters = GatherStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const GatherStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int32_t i = step.vectors.own<kThreads>();
    if (i < 0) return;
    const std::int32_t entry = step.work.entries[step.vectors.row(i)];
    const std::int64_t row = step.entries_per_row.quotient(entry);
    const std::int64_t from = row * step.vectors.width() + step.vectors.column(i);
    if (step.work.weights == nullptr) {
      static_cast<Vector16*>(step.work.y)[i] = static_cast<const Vector16*>(step.work.x)[from];
      return;
    }
    const float weight = step.work.weights[entry];
    rows::Elements x = rows::load<T>(step.work.x, from);
    x.for_each([&](float value, int) { return weight * value; });
    rows::store<T>(step.work.y, i, x);
  }
};

}  // namespace

void enqueue(const GatherSlots& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("slots", work.slots)
      .vectors("width", work.width, 8)
      .positive("entries_per_row", work.entries_per_row)
      .done("GatherSlots");
  const rows::RowVectors vectors("slots", work.slots, work.width, "GatherSlots");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = GatherVectors<T>;
    launch<Kernel>(vectors.shape<Kernel>(),
                   {.work = work, .vectors = vectors, .entries_per_row = Divisor(work.entries_per_row)},
                   stream);
  });
}

}  // namespace adaptrt::cuda
