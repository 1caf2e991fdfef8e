#pragma once

#include "adaptrt/program/ops.h"
#include "cuda/kernels/platform.h"

namespace adaptrt::cuda::rows {

/// x / (1 + exp(-power)). The fast exponential and division err by less than rounding to 16 bits does.
__device__ inline float times_sigmoid(float x, float power) {
  return __fdividef(x, 1.0F + __expf(-power));
}

__device__ inline float gelu(float x) {
  constexpr float kRootOfHalf = 0.707106781F;
  return 0.5F * x * erfcf(-kRootOfHalf * x);
}

/// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ inline float gelu_tanh(float x) {
  constexpr float kTwoRootsOfTwoByPi = 1.59576912F;
  return times_sigmoid(x, kTwoRootsOfTwoByPi * (x + 0.044715F * x * x * x));
}

/// NaN stays NaN.
__device__ inline float relu(float x) {
  return x < 0.0F ? 0.0F : x;
}

/// Activation of a layer without a gate.
template <LinearEpilogue kEpilogue>
__device__ inline float activate(float y) {
  if constexpr (kEpilogue == LinearEpilogue::kGelu) return gelu(y);
  if constexpr (kEpilogue == LinearEpilogue::kGeluTanh) return gelu_tanh(y);
  if constexpr (kEpilogue == LinearEpilogue::kRelu) return relu(y);
  if constexpr (kEpilogue == LinearEpilogue::kReluSquared) return relu(y) * relu(y);
  return y;
}

/// Activation of a gated layer.
template <LinearEpilogue kEpilogue>
__device__ inline float activate(float gated, float linear, float threshold) {
  if constexpr (kEpilogue == LinearEpilogue::kSiluMul) return times_sigmoid(gated, gated) * linear;
  if constexpr (kEpilogue == LinearEpilogue::kGeluMul) return gelu(gated) * linear;
  if constexpr (kEpilogue == LinearEpilogue::kGeluTanhMul) return gelu_tanh(gated) * linear;
  if constexpr (kEpilogue == LinearEpilogue::kReluMul) return gated <= threshold ? 0.0F : gated * linear;
  if constexpr (kEpilogue == LinearEpilogue::kReluMulRelu) {
    return gated <= threshold ? 0.0F : gated * relu(linear);
  }
  if constexpr (kEpilogue == LinearEpilogue::kClampedSiluMul) {
    constexpr float kLimit = 7.0F;
    constexpr float kGain = 1.702F;
    const float gate = gated > kLimit ? kLimit : gated;
    const float factor = linear > kLimit ? kLimit : linear < -kLimit ? -kLimit : linear;
    return times_sigmoid(gate, kGain * gate) * (factor + 1.0F);
  }
}

/// cap * tanh(y / cap)
__device__ inline float bounded(float y, float cap) {
  return cap * tanhf(y / cap);
}

}  // namespace adaptrt::cuda::rows
