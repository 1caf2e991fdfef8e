#pragma once

// Included after simd_*.h.

namespace adaptrt {
namespace {

/// exp(x) = 2^n exp(r) with n = round(x / ln 2) and r = x - n ln 2. ln 2 has two parts; n times the first one
/// is exact. exp(r) is its Taylor polynomial of degree 7. For |r| <= ln(2) / 2 it is off by less than 6e-9.
inline Simd::Vec exp_of(Simd::Vec x) {
  constexpr float kLowest = -87.33F;       // exp of less is not a normal number
  constexpr float kHighest = 88.37F;       // exp of more is not finite
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Simd::Vec bounded = Simd::min(Simd::set(kHighest), Simd::max(Simd::set(kLowest), x));
  const Simd::Vec shifted = Simd::fma(bounded, Simd::set(1.44269504F), Simd::set(kRounder));
  const Simd::Vec n = Simd::sub(shifted, Simd::set(kRounder));
  Simd::Vec r = Simd::fma(n, Simd::set(-0.693359375F), bounded);
  r = Simd::fma(n, Simd::set(2.12194440e-4F), r);
  Simd::Vec p = Simd::set(1.0F / 5040.0F);
  p = Simd::fma(p, r, Simd::set(1.0F / 720.0F));
  p = Simd::fma(p, r, Simd::set(1.0F / 120.0F));
  p = Simd::fma(p, r, Simd::set(1.0F / 24.0F));
  p = Simd::fma(p, r, Simd::set(1.0F / 6.0F));
  p = Simd::fma(p, r, Simd::set(0.5F));
  p = Simd::fma(p, r, Simd::set(1.0F));
  p = Simd::fma(p, r, Simd::set(1.0F));
  return Simd::zero_below(x, Simd::set(kLowest), Simd::add_to_exponent(p, shifted));
}

/// cap * tanh(x / cap) = cap - 2 cap / (exp(2 x / cap) + 1): off by some 1e-7 of cap.
inline Simd::Vec softcap_of(Simd::Vec x, Simd::Vec cap, Simd::Vec two_by_cap) {
  const Simd::Vec power = exp_of(Simd::mul(x, two_by_cap));
  return Simd::sub(cap, Simd::div(Simd::add(cap, cap), Simd::add(power, Simd::set(1.0F))));
}

/// 2^x = 2^n p(r) for x <= 126, with n = round(x) and r = x - n. p is the polynomial with p(0) = 1 that has
/// the smallest maximum relative error for |r| <= 1/2: 9e-8, or 1.1e-4 for results that are rounded to
/// bfloat16. 0 for x <= -150.
template <bool kToBFloat16>
inline Simd::Vec exp2_of(Simd::Vec x) {
  // NaN passes through, because max returns the second operand.
  const Simd::Vec bounded = Simd::max(Simd::set(-150.0F), x);
  const Simd::Vec n = Simd::round(bounded);
  const Simd::Vec r = Simd::sub(bounded, n);
  Simd::Vec p;
  if constexpr (kToBFloat16) {
    p = Simd::set(5.50089300e-2F);
    p = Simd::fma(p, r, Simd::set(2.42210960e-1F));
    p = Simd::fma(p, r, Simd::set(6.93282930e-1F));
  } else {
    p = Simd::set(1.32647180e-3F);
    p = Simd::fma(p, r, Simd::set(9.67151299e-3F));
    p = Simd::fma(p, r, Simd::set(5.55073395e-2F));
    p = Simd::fma(p, r, Simd::set(2.40222424e-1F));
    p = Simd::fma(p, r, Simd::set(6.93147004e-1F));
  }
  p = Simd::fma(p, r, Simd::set(1.0F));
  return Simd::times_power_of_two(p, n);
}

}  // namespace
}  // namespace adaptrt
