#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/row_values.h"

namespace adaptrt::cuda {
namespace {

using rows::kInfinity;

/// The best token so far. If a value is NaN or +infinity, the value is +infinity and the index
/// kUnusableLogits, which wins over all other ones.
struct Best {
  float value;
  std::int32_t index;

  /// Takes a later index only if its value is larger, or NaN.
  __device__ void take_later(float other, std::int32_t at) {
    if (other <= value) return;
    *this = other < kInfinity ? Best{other, at} : Best{kInfinity, kUnusableLogits};
  }
  __device__ void take(Best other) {
    if (other.value > value || (other.value == value && other.index < index)) *this = other;
  }
  __device__ void take_from_warp() {
    ADAPTRT_UNROLL
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      take({__shfl_xor_sync(kAllLanes, value, distance), __shfl_xor_sync(kAllLanes, index, distance)});
    }
  }
};

/// One block per row. kWidth: see RowValues.
template <int kWidth>
class BestTokensRows {
 public:
  using Parameters = BestTokens;
  static constexpr int kThreads = 1024;
  static constexpr int kBlocksPerMultiprocessor = 1;
  static constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kWarps == kWarpSize, "one warp takes the results of all warps");
  static constexpr std::size_t kSharedBytes = kWarps * sizeof(Best);

  __device__ static void run(const BestTokens& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const float* row = work.logits + static_cast<std::int64_t>(blockIdx.x) * work.stride;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    Best best{-kInfinity, kEveryTokenForbidden};
    constexpr int kLoads = 8;
    rows::RowValues<kThreads, kWidth, kLoads>(row, work.width)
        .for_each([&best](float value, std::int32_t at) { best.take_later(value, at); });
    auto* shared = reinterpret_cast<Best*>(shared_memory());
    best.take_from_warp();
    if (thread % kWarpSize == 0) shared[thread / kWarpSize] = best;
    __syncthreads();
    if (thread >= kWarpSize) return;
    best = shared[thread];
    best.take_from_warp();
    if (thread == 0) work.tokens[blockIdx.x] = best.index;
  }
};

}  // namespace

void enqueue(const BestTokens& work, void* stream) {
  rows::Checks()
      .count("rows", work.rows)
      .positive("width", work.width, rows::kMaxRowValues)
      .condition(work.stride >= work.width, "stride is below width")
      .done("BestTokens");
  rows::launch_rows<BestTokensRows, /*kOverlapsPrevious=*/true>(work, stream);
}

}  // namespace adaptrt::cuda
