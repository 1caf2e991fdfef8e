#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/block_sum.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

/// One block per row. Each thread keeps its first vector in registers, and reads further ones again. The
/// variance is the mean square of the distances to the mean, so that large means do not cancel.
template <typename T, typename Output, int kBlockThreads>
class LayerNormRows {
 public:
  using Parameters = LayerNorm;
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kBlocksPerMultiprocessor = 1024 / kThreads;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr std::size_t kSharedBytes = 2 * kWarps * sizeof(float);

  __device__ static void run(const LayerNorm& work) {
    allow_next_kernel();
    const auto vectors = static_cast<std::int32_t>(work.width / rows::kVector);
    const auto own = static_cast<std::int32_t>(threadIdx.x);
    const bool has_vector = own < vectors;
    wait_for_previous_kernel();
    const auto row = static_cast<std::int64_t>(blockIdx.x);
    const std::int64_t from = (work.row_ids == nullptr ? row : work.row_ids[row]) * vectors;
    auto* shared = reinterpret_cast<float*>(shared_memory());
    const auto elements = static_cast<float>(work.width);

    rows::Elements kept{};
    if (has_vector) kept = first_read(work, from + own);
    float sum = sum_of(kept);
    for (std::int32_t i = own + kThreads; i < vectors; i += kThreads) {
      sum += sum_of(first_read(work, from + i));
    }
    const float mean = rows::block_sum<kThreads>(sum, shared) / elements;

    float squares = has_vector ? squares_of(kept, mean) : 0.0F;
    for (std::int32_t i = own + kThreads; i < vectors; i += kThreads) {
      squares += squares_of(read_again(work, from + i), mean);
    }
    const float variance = rows::block_sum<kThreads>(squares, shared + kWarps) / elements;
    const float factor = rsqrtf(variance + work.epsilon);
    const float* shift = shift_of(work, row);
    if (has_vector) store(work, row * vectors, own, kept, mean, factor, shift);
    for (std::int32_t i = own + kThreads; i < vectors; i += kThreads) {
      store(work, row * vectors, i, read_again(work, from + i), mean, factor, shift);
    }
  }

 private:
  /// Vector `index` of stream + addend.
  __device__ static rows::Elements read(const LayerNorm& work, std::int64_t index) {
    rows::Elements sum = rows::load<float>(work.stream, index);
    if (work.addend != nullptr) {
      const rows::Elements addend = rows::load<T>(work.addend, index);
      sum.for_each([&](float value, int at) { return value + addend.values[at]; });
    }
    return sum;
  }

  __device__ static bool changes_stream(const LayerNorm& work) {
    return work.addend != nullptr && work.row_ids == nullptr;
  }

  /// The same; also stores it to stream, unless rows are gathered, since a row may be gathered twice.
  __device__ static rows::Elements first_read(const LayerNorm& work, std::int64_t index) {
    const rows::Elements sum = read(work, index);
    if (changes_stream(work)) rows::store<float>(work.stream, index, sum);
    return sum;
  }

  __device__ static rows::Elements read_again(const LayerNorm& work, std::int64_t index) {
    return changes_stream(work) ? rows::load<float>(work.stream, index) : read(work, index);
  }

  __device__ static float sum_of(const rows::Elements& elements) {
    float sum = 0.0F;
    ADAPTRT_UNROLL
    for (int i = 0; i < rows::kVector; ++i) sum += elements.values[i];
    return sum;
  }

  __device__ static float squares_of(const rows::Elements& elements, float mean) {
    float sum = 0.0F;
    ADAPTRT_UNROLL
    for (int i = 0; i < rows::kVector; ++i) {
      const float distance = elements.values[i] - mean;
      sum += distance * distance;
    }
    return sum;
  }

  /// The shift of a row's adapter; nullptr: it has none.
  __device__ static const float* shift_of(const LayerNorm& work, std::int64_t row) {
    const std::int32_t slot = work.adapter_slots == nullptr ? -1 : work.adapter_slots[row];
    if (slot < 0) return nullptr;
    return reinterpret_cast<const float*>(work.shifts[slot * work.slot_entries + work.entry]);
  }

  __device__ static void store(const LayerNorm& work, std::int64_t to, std::int32_t column,
                               rows::Elements elements, float mean, float factor, const float* shift) {
    const rows::Elements weight = rows::load_constant<float>(work.weight, column);
    elements.for_each([&](float value, int at) { return (value - mean) * factor * weight.values[at]; });
    if (work.bias != nullptr) {
      rows::Elements bias = rows::load_constant<float>(work.bias, column);
      if (shift != nullptr) {
        const rows::Elements more = rows::load_constant<float>(shift, column);
        bias.for_each([&](float value, int at) { return value + more.values[at]; });
      }
      elements.for_each([&](float value, int at) { return value + bias.values[at]; });
    }
    rows::store<Output>(work.output, to + column, elements);
  }
};

template <typename T, typename Output, int kThreads>
void launch_rows(const LayerNorm& work, void* stream) {
  using Kernel = LayerNormRows<T, Output, kThreads>;
  launch<Kernel>({.x = static_cast<std::uint32_t>(work.rows),
                  .shared_bytes = Kernel::kSharedBytes,
                  .overlaps_previous = true},
                 work, stream);
}

/// The number of threads depends only on the width, and so does the order of the sums.
template <typename T, typename Output>
void launch_for_width(const LayerNorm& work, void* stream) {
  const std::int64_t vectors = work.width / rows::kVector;
  if (vectors <= 128) {
    launch_rows<T, Output, 128>(work, stream);
  } else if (vectors <= 512) {
    launch_rows<T, Output, 512>(work, stream);
  } else {
    launch_rows<T, Output, 1024>(work, stream);
  }
}

}  // namespace

void enqueue(const LayerNorm& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("rows", work.rows)
      .vectors("width", work.width, 8)
      .condition(work.adapter_slots == nullptr || work.bias != nullptr, "shifts are for norms with a bias")
      .done("LayerNorm");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    if (work.float32_output) {
      launch_for_width<T, float>(work, stream);
    } else {
      launch_for_width<T, T>(work, stream);
    }
  });
}

}  // namespace adaptrt::cuda
