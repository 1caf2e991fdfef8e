#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/platform.h"

namespace adaptrt::cuda::rows {

/// Maximum width of a row.
inline constexpr std::int64_t kMaxRowValues = std::int64_t{1} << 30;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The float32 values of a row, distributed over the threads of a block. kWidth: floats of a load, 4, or 1 if
/// the row's address or width is not a multiple of 4. kLoads: loads that are in flight together.
template <int kThreads, int kWidth, int kLoads>
class RowValues {
 public:
  __device__ RowValues(const float* row, std::int64_t width)
      : row_(row), loads_(static_cast<std::int32_t>(width / kWidth)) {}

  /// Calls function(value, index) for each of this thread's values, with ascending indices. Some calls have
  /// -infinity and an index beyond the row.
  template <typename Function>
  __device__ void for_each(const Function& function) const {
    for (auto first = static_cast<std::int32_t>(threadIdx.x); first < loads_; first += kLoads * kThreads) {
      Values values[kLoads];
      ADAPTRT_UNROLL
      for (int load = 0; load < kLoads; ++load) values[load] = load_values(first + load * kThreads);
      ADAPTRT_UNROLL
      for (int load = 0; load < kLoads; ++load) {
        ADAPTRT_UNROLL
        for (int k = 0; k < kWidth; ++k) {
          function(values[load].values[k], (first + load * kThreads) * kWidth + k);
        }
      }
    }
  }

 private:
  struct alignas(kWidth * sizeof(float)) Values {
    float values[kWidth];
  };

  __device__ Values load_values(std::int32_t i) const {
    if (i < loads_) return reinterpret_cast<const Values*>(row_)[i];
    Values none;
    ADAPTRT_UNROLL
    for (int k = 0; k < kWidth; ++k) none.values[k] = -kInfinity;
    return none;
  }

  const float* row_;
  std::int32_t loads_;
};

/// Launches Kernel<kWidth> with one block for each row of `work`, whose rows have `width` values and are
/// `stride` apart. kOverlapsPrevious: see LaunchShape.
template <template <int> typename Kernel, bool kOverlapsPrevious, typename Work>
void launch_rows(const Work& work, void* stream) {
  constexpr int kWide = 4;
  const auto launch_width = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    launch<Kernel<kWidth>>({.x = static_cast<std::uint32_t>(work.rows),
                            .shared_bytes = Kernel<kWidth>::kSharedBytes,
                            .overlaps_previous = kOverlapsPrevious},
                           work, stream);
  };
  if (work.width % kWide == 0 && work.stride % kWide == 0) {
    launch_width(std::integral_constant<int, kWide>());
  } else {
    launch_width(std::integral_constant<int, 1>());
  }
}

}  // namespace adaptrt::cuda::rows
