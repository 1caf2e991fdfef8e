#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/kernels/platform.h"

namespace adaptrt::cuda {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// a * b, never fused with an addition: all kernels that use it get the same bits.
__device__ inline float rounded_product(float a, float b) {
#ifdef __CUDACC__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

/// 2^x with a relative error of about 2^-22; 0 if the result is below the smallest normal number.
__device__ inline float power_of_two(float x) {
#ifdef __CUDACC__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

/// 1 / x with a relative error of about 2^-23.
__device__ inline float reciprocal(float x) {
#ifdef __CUDACC__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0F / x;
#endif
}

/// softcap * tanh(score / softcap), with an error of about softcap / 2^21. `exponent` is 2 log2(e) / softcap.
__device__ inline float bounded(float score, float softcap, float exponent) {
  return fmaf(-2.0F * softcap, reciprocal(1.0F + power_of_two(score * exponent)), softcap);
}

/// Factor that converts weights relative to the maximum `from` to weights relative to `to` >= `from`; `scale`
/// converts both to units of log2. If there are no weights (from: minus infinity), it is 0. For equal maxima
/// it is exactly 1, even with fused operations, because the difference is computed before scaling. A
/// difference of two products, one of them fused, would keep a rounding error.
__device__ inline float rescale_factor(float from, float to, float scale = 1.0F) {
  return from == kMinusInfinity ? 0.0F : power_of_two((from - to) * scale);
}

/// The maximum, or the sum, over the four threads of a warp that hold one row of an mma result.
__device__ inline float row_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ inline float row_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

}  // namespace adaptrt::cuda
