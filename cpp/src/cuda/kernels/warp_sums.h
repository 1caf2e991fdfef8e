#pragma once

#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/warp.h"

namespace adaptrt::cuda {

/// Warp: the sum of the values of each kLanes neighbouring threads, in one order.
template <int kLanes = kWarpSize>
__device__ inline float sum_over_lanes(float sum) {
  ADAPTRT_UNROLL
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum;
}

/// Warp: the maximum of all threads' values.
__device__ inline float maximum_over_lanes(float maximum) {
  ADAPTRT_UNROLL
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, distance));
  }
  return maximum;
}

}  // namespace adaptrt::cuda
