#pragma once

#include "cuda/kernels/platform.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda::rows {

/// Block: the sum of all threads' values, in an order that depends only on the number of threads. `shared`
/// has room for one value per warp, and is not used again before the next barrier.
template <int kThreads>
__device__ inline float block_sum(float value, float* shared) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int thread = static_cast<int>(threadIdx.x);
  value = sum_over_lanes(value);
  if (thread % kWarpSize == 0) shared[thread / kWarpSize] = value;
  __syncthreads();
  return sum_over_lanes(thread % kWarpSize < kWarps ? shared[thread % kWarpSize] : 0.0F);
}

}  // namespace adaptrt::cuda::rows
