#pragma once

// Activations, at the end of gated and plain layers. Included after simd_*.h.

#include <cstddef>
#include <cstdint>
#include <limits>

#include "adaptrt/cpu/kernel_table.h"
#include "elementwise.h"
#include "exponential.h"

namespace adaptrt {
namespace {

/// 2^min(x, 126): the reciprocal of a greater power is not a normal number.
inline Simd::Vec bounded_power_for_bfloat16(Simd::Vec x) {
  return exp2_of<true>(Simd::min(Simd::set(126.0F), x));
}

/// x / (1 + 2^power), with a relative error of at most 1.8e-4. For results that are rounded to bfloat16.
inline Simd::Vec times_sigmoid_for_bfloat16(Simd::Vec x, Simd::Vec power) {
  const Simd::Vec divisor = Simd::add(Simd::set(1.0F), bounded_power_for_bfloat16(power));
  return Simd::mul(x, Simd::about_reciprocal(divisor));
}

struct Silu {
  static Simd::Vec exact(Simd::Vec x) {
    return Simd::div(x, Simd::add(Simd::set(1.0F), exp_of(Simd::sub(Simd::zero(), x))));
  }
  static Simd::Vec for_bfloat16(Simd::Vec x) {
    constexpr float kMinusLog2e = -1.44269504F;
    return times_sigmoid_for_bfloat16(x, Simd::mul(x, Simd::set(kMinusLog2e)));
  }
};

/// x Phi(x) = max(x, 0) - |x| Q(|x|) with Q(y) = 1 - Phi(y).
struct Gelu {
  static Simd::Vec magnitude(Simd::Vec x) { return Simd::max(x, Simd::sub(Simd::zero(), x)); }

  /// 2 Q(y) = erfc(y / sqrt(2)) by the rational approximation 7.1.26 of Abramowitz and Stegun's Handbook of
  /// Mathematical Functions, which is off by less than 1.5e-7.
  static Simd::Vec exact(Simd::Vec x) {
    const Simd::Vec one = Simd::set(1.0F);
    const Simd::Vec size = magnitude(x);
    const Simd::Vec z = Simd::mul(size, Simd::set(0.707106781F));
    const Simd::Vec t = Simd::div(one, Simd::fma(z, Simd::set(0.3275911F), one));
    Simd::Vec p = Simd::set(1.061405429F);
    p = Simd::fma(p, t, Simd::set(-1.453152027F));
    p = Simd::fma(p, t, Simd::set(1.421413741F));
    p = Simd::fma(p, t, Simd::set(-0.284496736F));
    p = Simd::fma(p, t, Simd::set(0.254829592F));
    p = Simd::mul(Simd::mul(p, t), exp_of(Simd::sub(Simd::zero(), Simd::mul(z, z))));
    return Simd::sub(Simd::max(x, Simd::zero()), Simd::mul(Simd::mul(size, Simd::set(0.5F)), p));
  }

  /// log2(Q(y)) by the polynomial that is -1 at 0 and has the smallest maximum error up to y = 5: the
  /// relative error of Q is 1.8e-4 there, and Q is less than 5e-7 beyond.
  static Simd::Vec for_bfloat16(Simd::Vec x) {
    const Simd::Vec size = magnitude(x);
    Simd::Vec p = Simd::set(-2.77863307e-4F);
    p = Simd::fma(p, size, Simd::set(5.40532443e-3F));
    p = Simd::fma(p, size, Simd::set(-4.68508933e-2F));
    p = Simd::fma(p, size, Simd::set(-4.65769915e-1F));
    p = Simd::fma(p, size, Simd::set(-1.14876986F));
    p = Simd::fma(p, size, Simd::set(-1.0F));
    return Simd::sub(Simd::max(x, Simd::zero()), Simd::mul(size, exp2_of<true>(p)));
  }
};

/// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static Simd::Vec exact(Simd::Vec x) {
    const Simd::Vec cube = Simd::mul(Simd::mul(x, x), x);
    const Simd::Vec u = Simd::fma(cube, Simd::set(0.044715F), x);
    const Simd::Vec power = exp_of(Simd::mul(u, Simd::set(-1.59576912F)));
    return Simd::div(x, Simd::add(Simd::set(1.0F), power));
  }
  static Simd::Vec for_bfloat16(Simd::Vec x) {
    constexpr float kFactor = -2.30220820F;  // -2 sqrt(2 / pi) log2(e)
    const Simd::Vec by_x = Simd::fma(Simd::mul(x, x), Simd::set(kFactor * 0.044715F), Simd::set(kFactor));
    return times_sigmoid_for_bfloat16(x, Simd::mul(x, by_x));
  }
};

struct Relu {
  /// If one operand is NaN, max returns the second.
  static Simd::Vec exact(Simd::Vec x) { return Simd::max(Simd::zero(), x); }
  static Simd::Vec for_bfloat16(Simd::Vec x) { return exact(x); }
};

struct ReluSquared {
  static Simd::Vec exact(Simd::Vec x) {
    const Simd::Vec positive = Relu::exact(x);
    return Simd::mul(positive, positive);
  }
  static Simd::Vec for_bfloat16(Simd::Vec x) { return exact(x); }
};

/// x + bias at index i of a row.
inline Simd::Vec biased(const float* x, const float* bias, std::int64_t i, std::int64_t lanes) {
  const Simd::Vec value = Simd::load(x + i, lanes);
  return bias == nullptr ? value : Simd::add(value, Simd::load(bias + i, lanes));
}

/// kIsGatedAlone: there is a factor, and there are no biases, as in most models.
template <class Function, bool kIsGatedAlone>
inline void activate_rows(const ActivatedTile& tile) {
  const auto rows = [&](const auto& function, const auto& store) {
    const float* x = tile.x;
    const float* linear = tile.linear;
    std::byte* out = tile.out;
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      for_each_vector(tile.width, [&](std::int64_t i, std::int64_t lanes) {
        if constexpr (kIsGatedAlone) {
          const Simd::Vec value = function(Simd::load(x + i, lanes));
          store(out, i, Simd::mul(value, Simd::load(linear + i, lanes)), lanes);
        } else {
          Simd::Vec value = function(biased(x, tile.bias, i, lanes));
          if (linear != nullptr) value = Simd::mul(value, biased(linear, tile.linear_bias, i, lanes));
          store(out, i, value, lanes);
        }
      });
      x += tile.stride;
      if (linear != nullptr) linear += tile.stride;
      out += tile.out_stride;
    }
  };
  const auto exact = [](Simd::Vec x) { return Function::exact(x); };
  const auto for_bfloat16 = [](Simd::Vec x) { return Function::for_bfloat16(x); };
  switch (tile.out_type) {
    case DType::kFloat32:
      return rows(exact, [](std::byte* out, std::int64_t i, Simd::Vec x, std::int64_t lanes) {
        Simd::store(reinterpret_cast<float*>(out) + i, x, lanes);
      });
    case DType::kFloat16:
      return rows(exact, [](std::byte* out, std::int64_t i, Simd::Vec x, std::int64_t lanes) {
        Simd::store_float16(out + i * 2, x, lanes);
      });
    case DType::kBFloat16:
      return rows(for_bfloat16, [](std::byte* out, std::int64_t i, Simd::Vec x, std::int64_t lanes) {
        Simd::store_bfloat16(out + i * 2, x, lanes);
      });
  }
}

/// kActivatesFactor: negative factors count as zero too.
template <bool kActivatesFactor>
void relu_mul(const ActivatedTile& tile) {
  const Simd::Vec threshold = Simd::set(tile.threshold);
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* x = tile.x + row * tile.stride;
    const float* linear = tile.linear + row * tile.stride;
    with_store(tile.out + row * tile.out_stride, tile.out_type, [&](const auto& store) {
      for_each_vector(tile.width, [&](std::int64_t i, std::int64_t lanes) {
        const Simd::Vec gate = biased(x, tile.bias, i, lanes);
        Simd::Vec factor = biased(linear, tile.linear_bias, i, lanes);
        if constexpr (kActivatesFactor) factor = Relu::exact(factor);
        store(i, Simd::zero_up_to(gate, threshold, Simd::mul(gate, factor)), lanes);
      });
    });
  }
}

/// expm1(x) - x for x <= 0. Near zero it is a polynomial, because a difference of exp(x) would lose its bits.
inline Simd::Vec expm1_beyond_linear(Simd::Vec x) {
  constexpr float kNear = 0.5F;
  constexpr float kBelowNear = 0.49999997F;  // so that one of the two terms is chosen at -0.5
  Simd::Vec p = Simd::set(1.0F / 40320.0F);
  for (const float divisor : {5040.0F, 720.0F, 120.0F, 24.0F, 6.0F, 2.0F}) {
    p = Simd::fma(p, x, Simd::set(1.0F / divisor));
  }
  const Simd::Vec near = Simd::zero_up_to(x, Simd::set(-kNear), Simd::mul(Simd::mul(x, x), p));
  const Simd::Vec rest = Simd::sub(Simd::sub(exp_of(x), Simd::set(1.0F)), x);
  const Simd::Vec far = Simd::zero_up_to(Simd::sub(Simd::zero(), x), Simd::set(kBelowNear), rest);
  return Simd::add(near, far);
}

inline void xielu(const XieluParameters& parameters, const float* x, std::int64_t n, std::byte* out,
                  DType out_type) {
  const Simd::Vec positive = Simd::set(parameters.positive);
  const Simd::Vec negative = Simd::set(parameters.negative);
  const Simd::Vec linear = Simd::set(parameters.linear);
  const Simd::Vec bound = Simd::set(parameters.bound);
  with_store(out, out_type, [&](const auto& store) {
    for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
      const Simd::Vec value = Simd::load(x + i, lanes);
      const Simd::Vec above = Relu::exact(value);
      const Simd::Vec below = Simd::min(bound, value);
      // expm1(below) - x = (expm1(below) - below) + (below - x)
      const Simd::Vec curve = Simd::add(expm1_beyond_linear(below), Simd::sub(below, value));
      const Simd::Vec minus = Simd::sub(Simd::zero(), value);
      Simd::Vec sum = Simd::mul(linear, value);
      sum = Simd::fma(Simd::mul(positive, above), above, sum);
      sum = Simd::add(sum, Simd::zero_below(minus, Simd::zero(), Simd::mul(negative, curve)));
      store(i, sum, lanes);
    });
  });
}

inline void close_gates(const float* scores, float least, std::int64_t n, float* gates) {
  const Simd::Vec bound = Simd::set(least);
  const Simd::Vec greatest = Simd::set(std::numeric_limits<float>::max());
  for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
    const Simd::Vec score = Simd::load(scores + i, lanes);
    const Simd::Vec kept = Simd::zero_below(score, bound, Simd::load(gates + i, lanes));
    const Simd::Vec added = Simd::sub(Simd::zero_below(score, bound, greatest), greatest);
    Simd::store(gates + i, Simd::add(kept, added), lanes);
  });
}

/// Activation of the experts of GPT-OSS.
inline void clamped_silu_mul(const ActivatedTile& tile) {
  constexpr float kLimit = 7.0F;
  constexpr float kGain = 1.702F;
  constexpr float kLog2e = 1.44269504F;
  const bool is_short = tile.out_type == DType::kBFloat16;
  const Simd::Vec one = Simd::set(1.0F);
  // If one operand is NaN, min and max return the second.
  const auto gated = [&](Simd::Vec x) {
    const Simd::Vec gate = Simd::min(Simd::set(kLimit), x);
    if (is_short) return times_sigmoid_for_bfloat16(gate, Simd::mul(gate, Simd::set(-kGain * kLog2e)));
    return Simd::div(gate, Simd::add(one, exp_of(Simd::mul(gate, Simd::set(-kGain)))));
  };
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* x = tile.x + row * tile.stride;
    const float* linear = tile.linear + row * tile.stride;
    with_store(tile.out + row * tile.out_stride, tile.out_type, [&](const auto& store) {
      for_each_vector(tile.width, [&](std::int64_t i, std::int64_t lanes) {
        const Simd::Vec up = Simd::max(
            Simd::set(-kLimit), Simd::min(Simd::set(kLimit), biased(linear, tile.linear_bias, i, lanes)));
        store(i, Simd::mul(gated(biased(x, tile.bias, i, lanes)), Simd::add(up, one)), lanes);
      });
    });
  }
}

inline void multiply_by_sigmoid(const float* gate, std::int64_t n, std::byte* x, DType type) {
  const Simd::Vec one = Simd::set(1.0F);
  with_store(x, type, [&](const auto& store) {
    for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
      const Simd::Vec power = exp_of(Simd::sub(Simd::zero(), Simd::load(gate + i, lanes)));
      store(i, Simd::div(load_as(x, type, i, lanes), Simd::add(one, power)), lanes);
    });
  });
}

template <class Function>
void activate(const ActivatedTile& tile) {
  if (tile.linear != nullptr && tile.bias == nullptr && tile.linear_bias == nullptr) {
    return activate_rows<Function, true>(tile);
  }
  activate_rows<Function, false>(tile);
}

}  // namespace
}  // namespace adaptrt
