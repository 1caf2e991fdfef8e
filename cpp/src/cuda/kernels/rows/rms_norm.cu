#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/block_sum.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

/// One block per row. Each thread keeps its first vector of the row in registers. If `kHasMore`, it has more
/// vectors, and reads those twice.
template <typename T, typename Output, int kBlockThreads, bool kHasMore>
class RmsNormRows {
 public:
  using Parameters = RmsNorm;
  static constexpr int kThreads = kBlockThreads;
  /// Every GPU has 1536 threads per multiprocessor or more.
  static constexpr int kBlocksPerMultiprocessor = kHasMore ? 1 : 1536 / kThreads;
  static constexpr std::size_t kSharedBytes = kThreads / kWarpSize * sizeof(float);

  __device__ static void run(const RmsNorm& work) {
    allow_next_kernel();
    const auto vectors = static_cast<std::int32_t>(work.width / rows::kVector);
    const auto own = static_cast<std::int32_t>(threadIdx.x);
    const bool has_vector = own < vectors;
    rows::Elements weight{};
    if (has_vector) weight = rows::load_constant<float>(work.weight, own);
    wait_for_previous_kernel();
    const auto row = static_cast<std::int64_t>(blockIdx.x);
    const std::int64_t from = (work.row_ids == nullptr ? row : work.row_ids[row]) * vectors;
    rows::Elements kept{};
    if (has_vector) kept = first_read(work, from + own);
    float squares = sum_of_squares(kept);
    if constexpr (kHasMore) {
      for (std::int32_t i = own + kThreads; i < vectors; i += kThreads) {
        squares += sum_of_squares(first_read(work, from + i));
      }
    }
    const float sum = rows::block_sum<kThreads>(squares, reinterpret_cast<float*>(shared_memory()));
    const float factor = rsqrtf(sum / static_cast<float>(work.width) + work.epsilon);
    if (has_vector) store(work, row * vectors + own, kept, factor, weight);
    if constexpr (kHasMore) {
      const bool is_added = work.addend != nullptr && work.row_ids == nullptr;
      for (std::int32_t i = own + kThreads; i < vectors; i += kThreads) {
        const rows::Elements again =
            is_added ? rows::load<float>(work.stream, from + i) : read(work, from + i);
        store(work, row * vectors + i, again, factor, rows::load_constant<float>(work.weight, i));
      }
    }
  }

 private:
  /// Vector `index` of stream + addend.
  __device__ static rows::Elements read(const RmsNorm& work, std::int64_t index) {
    rows::Elements sum = rows::load<float>(work.stream, index);
    if (work.addend != nullptr) {
      const rows::Elements addend = rows::load<T>(work.addend, index);
      sum.for_each([&](float value, int at) { return value + addend.values[at]; });
    }
    return sum;
  }

  /// The same; also stores it to stream, unless rows are gathered, since a row may be gathered twice.
  __device__ static rows::Elements first_read(const RmsNorm& work, std::int64_t index) {
    const rows::Elements sum = read(work, index);
    if (work.addend != nullptr && work.row_ids == nullptr) rows::store<float>(work.stream, index, sum);
    return sum;
  }

  __device__ static float sum_of_squares(const rows::Elements& elements) {
    float sum = 0.0F;
    ADAPTRT_UNROLL
    for (int i = 0; i < rows::kVector; ++i) sum += elements.values[i] * elements.values[i];
    return sum;
  }

  __device__ static void store(const RmsNorm& work, std::int64_t index, rows::Elements elements, float factor,
                               const rows::Elements& weight) {
    elements.for_each([&](float value, int at) { return value * factor * weight.values[at]; });
    rows::store<Output>(work.output, index, elements);
  }
};

template <typename T, typename Output, int kThreads, bool kHasMore = false>
void launch_rows(const RmsNorm& work, void* stream) {
  using Kernel = RmsNormRows<T, Output, kThreads, kHasMore>;
  launch<Kernel>({.x = static_cast<std::uint32_t>(work.rows),
                  .shared_bytes = Kernel::kSharedBytes,
                  .overlaps_previous = true},
                 work, stream);
}

/// The number of threads depends only on the width, and so does the order of the sum.
template <typename T, typename Output>
void launch_for_width(const RmsNorm& work, void* stream) {
  const std::int64_t vectors = work.width / rows::kVector;
  if (vectors <= 128) {
    launch_rows<T, Output, 128>(work, stream);
  } else if (vectors <= 256) {
    launch_rows<T, Output, 256>(work, stream);
  } else if (vectors <= 512) {
    launch_rows<T, Output, 512>(work, stream);
  } else if (vectors <= 1024) {
    launch_rows<T, Output, 1024>(work, stream);
  } else {
    launch_rows<T, Output, 1024, true>(work, stream);
  }
}

}  // namespace

void enqueue(const RmsNorm& work, void* stream) {
  rows::Checks().type(work.dtype).count("rows", work.rows).vectors("width", work.width, 8).done("RmsNorm");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    if (work.float32_output) {
      launch_for_width<T, float>(work, stream);
    } else {
      launch_for_width<T, T>(work, stream);
    }
  });
}

}  // namespace adaptrt::cuda
