#pragma once

#include <cstdint>

#include "cuda/kernels/platform.h"
#ifndef __CUDACC__
#include "adaptrt/core/dtype.h"
#endif

namespace adaptrt::cuda {

/// Storage of an IEEE half and of a bfloat16: two bytes, converted to float32 for arithmetic.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

/// Two numbers in one 32-bit register; `first` is in the low half, at the lower address.
struct FloatPair {
  float first;
  float second;
};

/// Sixteen bytes, the most that a thread loads or stores at once.
struct alignas(16) Vector16 {
  std::uint32_t words[4];
};

#ifdef __CUDACC__

__device__ inline float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

__device__ inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even.
template <typename T>
__device__ T from_float(float value);

template <>
__device__ inline Half from_float<Half>(float value) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

template <>
__device__ inline BFloat16 from_float<BFloat16>(float value) {
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

/// from_float of two numbers.
template <typename T>
__device__ std::uint32_t pack_pair(float first, float second);

template <>
__device__ inline std::uint32_t pack_pair<Half>(float first, float second) {
  std::uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
}

template <>
__device__ inline std::uint32_t pack_pair<BFloat16>(float first, float second) {
  std::uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
}

#else

inline float to_float(Half value) {
  return float16_to_float(value.bits);
}
inline float to_float(BFloat16 value) {
  return bfloat16_to_float(value.bits);
}

template <typename T>
T from_float(float value);

template <>
inline Half from_float<Half>(float value) {
  return {float_to_float16(value)};
}

template <>
inline BFloat16 from_float<BFloat16>(float value) {
  return {float_to_bfloat16(value)};
}

template <typename T>
std::uint32_t pack_pair(float first, float second) {
  return from_float<T>(first).bits | static_cast<std::uint32_t>(from_float<T>(second).bits) << 16;
}

#endif

template <typename T>
__device__ inline FloatPair unpack_pair(std::uint32_t pair) {
  return {to_float(T{static_cast<std::uint16_t>(pair & 0xffffU)}),
          to_float(T{static_cast<std::uint16_t>(pair >> 16)})};
}

}  // namespace adaptrt::cuda
