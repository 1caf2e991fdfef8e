#pragma once

#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"

namespace adaptrt::cuda::rows {

/// Block: the sum of all threads' values, in an order that depends only on the number of threads. `shared`
/// has room for one value per warp, and is not used again before the next barrier.
template <int kThreads>
__device__ inline float block_sum(float value, float* shared) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int thread = static_cast<int>(threadIdx.x);
  ADAPTRT_UNROLL
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  if (thread % kWarpSize == 0) shared[thread / kWarpSize] = value;
  __syncthreads();
  float sum = thread % kWarpSize < kWarps ? shared[thread % kWarpSize] : 0.0F;
  ADAPTRT_UNROLL
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum;
}

}  // namespace adaptrt::cuda::rows
