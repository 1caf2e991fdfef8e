#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/block_sum.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

/// One block per row. Each thread keeps its first vector in registers, and reads further ones twice.
template <typename Input, int kBlockThreads>
class AddedNormRows {
 public:
  using Parameters = AddedNorm;
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kBlocksPerMultiprocessor = 1024 / kThreads;
  static constexpr std::size_t kSharedBytes = kThreads / kWarpSize * sizeof(float);

  __device__ static void run(const AddedNorm& work) {
    allow_next_kernel();
    const auto vectors = static_cast<std::int32_t>(work.width / rows::kVector);
    const auto own = static_cast<std::int32_t>(threadIdx.x);
    wait_for_previous_kernel();
    const std::int64_t from = static_cast<std::int64_t>(blockIdx.x) * vectors;
    rows::Elements kept{};
    if (own < vectors) kept = rows::load<Input>(work.input, from + own);
    float squares = sum_of_squares(kept);
    for (std::int32_t i = own + kThreads; i < vectors; i += kThreads) {
      squares += sum_of_squares(rows::load<Input>(work.input, from + i));
    }
    const float sum = rows::block_sum<kThreads>(squares, reinterpret_cast<float*>(shared_memory()));
    const float factor = rsqrtf(sum / static_cast<float>(work.width) + work.epsilon);
    if (own < vectors) add(work, from, own, kept, factor);
    for (std::int32_t i = own + kThreads; i < vectors; i += kThreads) {
      add(work, from, i, rows::load<Input>(work.input, from + i), factor);
    }
  }

 private:
  __device__ static float sum_of_squares(const rows::Elements& elements) {
    float sum = 0.0F;
    ADAPTRT_UNROLL
    for (int i = 0; i < rows::kVector; ++i) sum += elements.values[i] * elements.values[i];
    return sum;
  }

  __device__ static void add(const AddedNorm& work, std::int64_t from, std::int32_t column,
                             const rows::Elements& x, float factor) {
    const rows::Elements weight = rows::load_constant<float>(work.weight, column);
    rows::Elements sum = rows::load<float>(work.stream, from + column);
    sum.for_each([&](float value, int at) { return value + x.values[at] * factor * weight.values[at]; });
    if (work.sum_scale != nullptr) {
      const float scale = *work.sum_scale;
      sum.for_each([&](float value, int) { return value * scale; });
    }
    rows::store<float>(work.stream, from + column, sum);
  }
};

template <typename Input, int kThreads>
void launch_rows(const AddedNorm& work, void* stream) {
  using Kernel = AddedNormRows<Input, kThreads>;
  launch<Kernel>({.x = static_cast<std::uint32_t>(work.rows),
                  .shared_bytes = Kernel::kSharedBytes,
                  .overlaps_previous = true},
                 work, stream);
}

/// The number of threads depends only on the width, and so does the order of the sum.
template <typename Input>
void launch_for_width(const AddedNorm& work, void* stream) {
  const std::int64_t vectors = work.width / rows::kVector;
  if (vectors <= 128) {
    launch_rows<Input, 128>(work, stream);
  } else if (vectors <= 512) {
    launch_rows<Input, 512>(work, stream);
  } else {
    launch_rows<Input, 1024>(work, stream);
  }
}

}  // namespace

void enqueue(const AddedNorm& work, void* stream) {
  rows::Checks().type(work.dtype).count("rows", work.rows).vectors("width", work.width, 8).done("AddedNorm");
  if (work.float32_input) {
    launch_for_width<float>(work, stream);
    return;
  }
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) { launch_for_width<T>(work, stream); });
}

}  // namespace adaptrt::cuda
