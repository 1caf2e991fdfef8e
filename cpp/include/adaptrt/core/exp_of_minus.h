#pragma once

#include <cstdint>

/// Functions for the host and, in sources that nvcc compiles, for the device only.
#ifdef __CUDACC__
#define ADAPTRT_DEVICE_OF_NVCC __device__
#else
#define ADAPTRT_DEVICE_OF_NVCC
#endif

namespace adaptrt {

/// exp(-x) for x >= 0; 0 above 87. The relative error is below 1e-6. The same bits on every machine and
/// device: `Arithmetic` has the operations, none of which may be fused with another.
///   static float product(float, float), sum(float, float), difference(float, float);
///   static std::uint32_t bits(float), and its inverse, float from_bits(std::uint32_t);
///
/// The usual reduction to 2^n * exp(r), |r| <= ln(2) / 2, and a Taylor polynomial of degree 6, whose relative
/// error is below 2^-22 there. Comparisons use the bits as integers, which have the same order for
/// non-negative floats: float comparisons may trap, which prevents vectorisation.
template <typename Arithmetic>
ADAPTRT_DEVICE_OF_NVCC inline float exp_of_minus(float x) {
  using A = Arithmetic;
  constexpr float kLog2E = 1.44269504F;
  // ln(2) in two parts; n times the first is exact.
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  // Adding it rounds to an integer, which is then in the lowest bits.
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23
  constexpr std::uint32_t kRounderBits = 0x4b400000U;
  constexpr std::int32_t kLargest = 0x42ae0000;  // the bits of 87
  const auto bits = static_cast<std::int32_t>(A::bits(x) & 0x7fffffffU);
  // All ones up to kLargest, zero above. `?:` would become a branch.
  const std::int32_t mask = (bits - kLargest - 1) >> 31;
  const float clamped = -A::from_bits(static_cast<std::uint32_t>((bits & mask) | (kLargest & ~mask)));
  const float shifted = A::sum(A::product(clamped, kLog2E), kRounder);
  const float n = A::difference(shifted, kRounder);
  const float high = A::difference(clamped, A::product(n, kLn2High));
  const float r = A::difference(high, A::product(n, kLn2Low));
  float p = 1.0F / 720.0F;
  p = A::sum(A::product(p, r), 1.0F / 120.0F);
  p = A::sum(A::product(p, r), 1.0F / 24.0F);
  p = A::sum(A::product(p, r), 1.0F / 6.0F);
  p = A::sum(A::product(p, r), 0.5F);
  p = A::sum(A::product(p, r), 1.0F);
  p = A::sum(A::product(p, r), 1.0F);
  const std::uint32_t exponent = (A::bits(shifted) - kRounderBits + 127U) << 23;
  const float result = A::product(p, A::from_bits(exponent));
  return A::from_bits(A::bits(result) & static_cast<std::uint32_t>(mask));
}

}  // namespace adaptrt
