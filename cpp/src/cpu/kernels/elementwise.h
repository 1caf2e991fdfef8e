#pragma once

// Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/element_scan.h"
#include "adaptrt/cpu/kernel_table.h"
#include "exponential.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Calls body(first lane, lanes) for whole vectors, then for the rest.
template <class Body>
inline void for_each_vector(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) body(i, std::int64_t{Simd::kLanes});
  if (i < n) body(i, n - i);
}

inline Simd::Vec load_as(const std::byte* x, DType type, std::int64_t index, std::int64_t lanes) {
  switch (type) {
    case DType::kFloat32:
      return Simd::load(reinterpret_cast<const float*>(x) + index, lanes);
    case DType::kFloat16:
      return Simd::load_float16(x + index * 2, lanes);
    case DType::kBFloat16:
      return Simd::load_bfloat16(x + index * 2, lanes);
  }
  return Simd::zero();
}

/// Calls body(store), where store(index, x, lanes) stores to `out` as `type`. Tests the type only once.
template <class Body>
inline void with_store(std::byte* out, DType type, const Body& body) {
  switch (type) {
    case DType::kFloat32:
      body([=](std::int64_t index, Simd::Vec x, std::int64_t lanes) {
        Simd::store(reinterpret_cast<float*>(out) + index, x, lanes);
      });
      return;
    case DType::kFloat16:
      body([=](std::int64_t index, Simd::Vec x, std::int64_t lanes) {
        Simd::store_float16(out + index * 2, x, lanes);
      });
      return;
    case DType::kBFloat16:
      body([=](std::int64_t index, Simd::Vec x, std::int64_t lanes) {
        Simd::store_bfloat16(out + index * 2, x, lanes);
      });
      return;
  }
}

/// Sum over vectors, where term(first lane, lanes, sum) returns the sum with a vector's term added. There are
/// four sums, so that additions do not wait for each other; vector i goes to sum i % 4.
template <class Term>
inline float sum_of_vectors(std::int64_t n, const Term& term) {
  constexpr std::int64_t kSums = 4;
  Simd::Vec sums[kSums] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
  std::int64_t i = 0;
  for (; i + kSums * Simd::kLanes <= n; i += kSums * Simd::kLanes) {
    for (std::int64_t v = 0; v < kSums; ++v)
      sums[v] = term(i + v * Simd::kLanes, std::int64_t{Simd::kLanes}, sums[v]);
  }
  for (std::int64_t v = 0; i < n; ++v, i += Simd::kLanes) {
    sums[v] = term(i, std::min<std::int64_t>(Simd::kLanes, n - i), sums[v]);
  }
  return Simd::sum(Simd::add(Simd::add(sums[0], sums[1]), Simd::add(sums[2], sums[3])));
}

inline void rms_norm(const float* x, const float* weight, float epsilon, std::int64_t n, std::byte* out,
                     DType out_type) {
  const float squares = sum_of_vectors(n, [&](std::int64_t i, std::int64_t lanes, Simd::Vec sum) {
    const Simd::Vec value = Simd::load(x + i, lanes);
    return Simd::fma(value, value, sum);
  });
  const Simd::Vec factor = Simd::set(1.0F / std::sqrt(squares / static_cast<float>(n) + epsilon));
  with_store(out, out_type, [&](auto store) {
    for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
      const Simd::Vec scaled = Simd::mul(Simd::load(x + i, lanes), factor);
      store(i, Simd::mul(scaled, Simd::load(weight + i, lanes)), lanes);
    });
  });
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, std::int64_t n,
                       std::byte* out, DType out_type) {
  // The mean is subtracted before squaring, so that a large mean costs no accuracy.
  const float total = sum_of_vectors(n, [&](std::int64_t i, std::int64_t lanes, Simd::Vec sum) {
    return Simd::add(sum, Simd::load(x + i, lanes));
  });
  const Simd::Vec mean = Simd::set(total / static_cast<float>(n));
  const auto centred = [&](std::int64_t i, std::int64_t lanes) {
    // Lanes beyond the last element stay zero.
    return lanes == Simd::kLanes
               ? Simd::sub(Simd::load(x + i), mean)
               : Simd::select_lanes(0, lanes, Simd::sub(Simd::load(x + i, lanes), mean), Simd::zero());
  };
  const float squares = sum_of_vectors(n, [&](std::int64_t i, std::int64_t lanes, Simd::Vec sum) {
    const Simd::Vec value = centred(i, lanes);
    return Simd::fma(value, value, sum);
  });
  const Simd::Vec factor = Simd::set(1.0F / std::sqrt(squares / static_cast<float>(n) + epsilon));
  with_store(out, out_type, [&](auto store) {
    for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
      const Simd::Vec scaled = Simd::mul(Simd::mul(centred(i, lanes), factor), Simd::load(weight + i, lanes));
      store(i, bias == nullptr ? scaled : Simd::add(scaled, Simd::load(bias + i, lanes)), lanes);
    });
  });
}

inline void softcap(float cap, std::int64_t n, float* x) {
  const Simd::Vec caps = Simd::set(cap);
  const Simd::Vec two_by_cap = Simd::set(2.0F / cap);
  for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
    Simd::store(x + i, softcap_of(Simd::load(x + i, lanes), caps, two_by_cap), lanes);
  });
}

inline void add(const float* x, std::int64_t n, float* out) {
  for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
    Simd::store(out + i, Simd::add(Simd::load(out + i, lanes), Simd::load(x + i, lanes)), lanes);
  });
}

inline void multiply(const float* x, std::int64_t n, float* out) {
  for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
    Simd::store(out + i, Simd::mul(Simd::load(out + i, lanes), Simd::load(x + i, lanes)), lanes);
  });
}

inline void add_up_rows(const WeightedRows& weighted) {
  for_each_vector(weighted.width, [&](std::int64_t i, std::int64_t lanes) {
    const auto product = [&](std::int64_t number) {
      const float* row = weighted.rows + weighted.row_of[number] * weighted.stride;
      return Simd::mul(Simd::load(row + i, lanes), Simd::set(weighted.weights[number]));
    };
    Simd::Vec sum = product(0);
    for (std::int64_t number = 1; number < weighted.count; ++number) sum = Simd::add(sum, product(number));
    if (weighted.accumulate) sum = Simd::add(Simd::load(weighted.out + i, lanes), sum);
    Simd::store(weighted.out + i, sum, lanes);
  });
}

inline void scatter_rows(const ScatteredRows& scattered) {
  for (std::int64_t row = 0; row < scattered.count; ++row) {
    const float* x = scattered.rows + row * scattered.stride;
    float* out = scattered.out + scattered.row_of[row] * scattered.out_stride;
    const Simd::Vec weight = Simd::set(scattered.weights[row]);
    for_each_vector(scattered.width, [&](std::int64_t i, std::int64_t lanes) {
      const Simd::Vec product = Simd::mul(Simd::load(x + i, lanes), weight);
      Simd::store(out + i, Simd::add(Simd::load(out + i, lanes), product), lanes);
    });
  }
}

inline void scale_and_store(const float* x, float factor, std::int64_t n, std::byte* out, DType out_type) {
  const Simd::Vec factors = Simd::set(factor);
  with_store(out, out_type, [&](auto store) {
    for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
      store(i, Simd::mul(Simd::load(x + i, lanes), factors), lanes);
    });
  });
}

inline void rotate_heads(const HeadRotation& rotation) {
  const std::int64_t half = rotation.half;
  const Simd::Vec factor = Simd::set(rotation.factor);
  with_store(rotation.out, rotation.out_type, [&](auto store) {
    for (std::int64_t first = 0; first < rotation.heads * rotation.head_dim; first += rotation.head_dim) {
      const float* x = rotation.x + first;
      for_each_vector(half, [&](std::int64_t i, std::int64_t lanes) {
        const Simd::Vec c = Simd::load(rotation.cosine + i, lanes);
        const Simd::Vec s = Simd::load(rotation.sine + i, lanes);
        const Simd::Vec a = Simd::load(x + i, lanes);
        const Simd::Vec b = Simd::load(x + half + i, lanes);
        const Simd::Vec a_rotated = Simd::sub(Simd::mul(a, c), Simd::mul(b, s));
        const Simd::Vec b_rotated = Simd::add(Simd::mul(b, c), Simd::mul(a, s));
        store(first + i, Simd::mul(a_rotated, factor), lanes);
        store(first + half + i, Simd::mul(b_rotated, factor), lanes);
      });
      const std::int64_t rotated = 2 * half;
      for_each_vector(rotation.head_dim - rotated, [&](std::int64_t i, std::int64_t lanes) {
        store(first + rotated + i, Simd::mul(Simd::load(x + rotated + i, lanes), factor), lanes);
      });
    }
  });
}

/// Returns the maximum lane.
inline std::uint32_t greatest_lane(Simd::Words bits) {
  std::uint32_t each[Simd::kLanes];
  Simd::store_words(reinterpret_cast<std::byte*>(each), bits, Simd::kLanes);
  return *std::max_element(each, each + Simd::kLanes);
}

/// Returns the maximum of the bits of n values without their signs. These bits have the order of the
/// magnitudes, with infinity and then NaN at the top. load(first lane, lanes) loads the values.
template <class Load>
inline std::uint32_t greatest_magnitude(std::int64_t n, const Load& load) {
  Simd::Words bits = Simd::zero_words();
  for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
    bits = Simd::greatest_of(bits, Simd::without_sign(load(i, lanes)));
  });
  return greatest_lane(bits);
}

inline bool store_bfloat16_pairs(const float* even, const float* odd, std::int64_t n, std::byte* out) {
  Simd::Words bits = Simd::zero_words();
  for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
    const Simd::Vec x = Simd::load(even + i, lanes);
    const Simd::Vec y = Simd::load(odd + i, lanes);
    bits = Simd::greatest_of(bits, Simd::greatest_of(Simd::without_sign(x), Simd::without_sign(y)));
    Simd::store_words(out + i * 4,
                      Simd::pack_bfloat16(Simd::round_to_bfloat16(x), Simd::round_to_bfloat16(y)), lanes);
  });
  return greatest_lane(bits) < float32_limit(DType::kBFloat16);
}

inline bool are_finite(const float* x, std::int64_t n, DType type) {
  const auto load = [&](std::int64_t i, std::int64_t lanes) { return Simd::load(x + i, lanes); };
  return greatest_magnitude(n, load) < float32_limit(type);
}

inline void exp_array(const float* x, std::int64_t n, float* out) {
  for_each_vector(n, [&](std::int64_t i, std::int64_t lanes) {
    Simd::store(out + i, exp_of(Simd::load(x + i, lanes)), lanes);
  });
}

}  // namespace
}  // namespace adaptrt
