#include <cstdint>

#include "adaptrt/cuda/new_token_logits.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/lora/vectors.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda {
namespace {

/// Grid: x rows, y blocks of kTokensPerBlock new tokens. A warp computes one logit: each lane adds the
/// products of every 32nd vector, and then the lanes' sums are added.
template <typename T>
class NewTokenLogitsRows {
 public:
  using Parameters = NewTokenLogits;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr int kTokensPerBlock = kThreads / kWarpSize;

  __device__ static void run(const NewTokenLogits& work) {
    allow_next_kernel();
    const auto row = static_cast<std::int64_t>(blockIdx.x);
    const auto token = static_cast<std::int32_t>(blockIdx.y * kTokensPerBlock + threadIdx.x / kWarpSize);
    const std::int32_t slot = work.adapter_slots[row];
    const std::int64_t entry = slot < 0 ? 0 : slot * work.slot_entries + work.entry;
    const std::int32_t tokens = slot < 0 ? 0 : work.ranks[entry];
    wait_for_previous_kernel();
    if (token >= tokens) return;
    const T* a = reinterpret_cast<const T*>(work.pointers[3 * entry]) + token * work.width;
    const T* x = static_cast<const T*>(work.x) + row * work.width;
    const float sum = lora::rows_are_aligned(a, work.width)
                          ? product<lora::Rows::kOfVectors>(x, a, static_cast<int>(work.width))
                          : product<lora::Rows::kAnyhow>(x, a, static_cast<int>(work.width));
    if (threadIdx.x % kWarpSize != 0) return;
    const float scaled = sum * work.scale;
    work.logits[row * (work.vocabulary + work.max_tokens) + work.vocabulary + token] =
        work.softcap == 0.0F ? scaled : rows::bounded(scaled, work.softcap);
  }

 private:
  template <lora::Rows kRowsOfA>
  __device__ static float product(const T* x, const T* a, int width) {
    float sum = 0.0F;
    const auto lane = static_cast<int>(threadIdx.x) % kWarpSize;
    for (int k = lane * rows::kVector; k < width; k += kWarpSize * rows::kVector) {
      const rows::Elements own = rows::unpack<T>(lora::load_own_vector<lora::Rows::kOfVectors>(x, k, width));
      const rows::Elements weight = rows::unpack<T>(lora::load_vector<kRowsOfA>(a, k, width));
      ADAPTRT_UNROLL
      for (int i = 0; i < rows::kVector; ++i) sum = fmaf(own.values[i], weight.values[i], sum);
    }
    return sum_over_lanes(sum);
  }
};

}  // namespace

void enqueue(const NewTokenLogits& work, void* stream) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 16;
  rows::Checks()
      .type(work.dtype)
      .count("rows", work.rows)
      .vectors("width", work.width, 8)
      .positive("vocabulary", work.vocabulary)
      .positive("max_tokens", work.max_tokens, kMostTokens)
      .condition(work.entry >= 0 && work.entry < work.slot_entries, "a slot has no such entry")
      .done("NewTokenLogits");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = NewTokenLogitsRows<T>;
    launch<Kernel>({.x = static_cast<std::uint32_t>(work.rows),
                    .y = rows::blocks_for(work.max_tokens, Kernel::kTokensPerBlock),
                    .overlaps_previous = true},
                   work, stream);
  });
}

}  // namespace adaptrt::cuda
