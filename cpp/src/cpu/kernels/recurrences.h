#pragma once

// Kernels that advance the state of a sequence row by row. Included after simd_*.h.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "adaptrt/cpu/kernel_table.h"
#include "elementwise.h"

namespace adaptrt {
namespace {

/// Adds the products of the taps with the state's rows and with the newest `input` to `sum`, for columns from
/// `column` on, and moves the state on by one row.
template <class Convolution>
inline Simd::Vec sum_over_taps(const Convolution& convolution, std::int64_t column, std::int64_t lanes,
                               Simd::Vec input, Simd::Vec sum) {
  const std::int64_t before = convolution.taps - 1;
  const float* weight = convolution.weight + column;
  float* state = convolution.state + column;
  for (std::int64_t tap = 0; tap < before; ++tap) {
    const Simd::Vec earlier = Simd::load(state, lanes);
    sum = Simd::fma(Simd::load(weight, lanes), earlier, sum);
    if (tap > 0) Simd::store(state - convolution.tap_stride, earlier, lanes);
    weight += convolution.tap_stride;
    state += convolution.tap_stride;
  }
  if (before > 0) Simd::store(state - convolution.tap_stride, input, lanes);
  return Simd::fma(Simd::load(weight, lanes), input, sum);
}

inline void causal_convolution(const CausalConvolution& convolution) {
  const float* bias = convolution.bias;
  for (std::int64_t row = 0; row < convolution.rows; ++row) {
    float* x = convolution.x + row * convolution.stride;
    for_each_vector(convolution.width, [&](std::int64_t i, std::int64_t lanes) {
      const Simd::Vec start = bias == nullptr ? Simd::zero() : Simd::load(bias + i, lanes);
      const Simd::Vec sum = sum_over_taps(convolution, i, lanes, Simd::load(x + i, lanes), start);
      Simd::store(x + i, Silu::exact(sum), lanes);
    });
  }
}

inline void gated_convolution(const GatedConvolution& convolution) {
  const float* bias = convolution.bias;
  for (std::int64_t row = 0; row < convolution.rows; ++row) {
    const std::int64_t first = row * convolution.stride;
    std::byte* out = convolution.out +
                     static_cast<std::size_t>(row * convolution.out_stride) * size_of(convolution.out_type);
    with_store(out, convolution.out_type, [&](auto store) {
      for_each_vector(convolution.width, [&](std::int64_t i, std::int64_t lanes) {
        const auto load = [&](const float* from) { return Simd::load(from + first + i, lanes); };
        const Simd::Vec start = bias == nullptr ? Simd::zero() : Simd::load(bias + i, lanes);
        const Simd::Vec input = Simd::mul(load(convolution.before), load(convolution.x));
        const Simd::Vec sum = sum_over_taps(convolution, i, lanes, input, start);
        store(i, Simd::mul(load(convolution.after), sum), lanes);
      });
    });
  }
}

/// `kVectors` vectors of columns with `lanes` columns each (kLanes, if kIsWhole), whose states stay in the L1
/// cache from row to row.
template <int kVectors, bool kIsWhole>
struct StateColumns {
  static constexpr int kSums = 4;

  [[nodiscard]] Simd::Vec load(const float* from, int v) const {
    if constexpr (kIsWhole) return Simd::load(from + v * Simd::kLanes);
    return Simd::load(from + v * Simd::kLanes, lanes);
  }
  void store(float* to, int v, Simd::Vec x) const {
    if constexpr (kIsWhole) return Simd::store(to + v * Simd::kLanes, x);
    Simd::store(to + v * Simd::kLanes, x, lanes);
  }
  /// Calls add(element, its sums) for `count` elements; element i has sums i % kSums.
  template <class Add>
  void sum_elements(std::int64_t count, const Add& add) {
    for (auto& sum : sums) {
      for (Simd::Vec& vector : sum) vector = Simd::zero();
    }
    std::int64_t i = 0;
    for (; i + kSums <= count; i += kSums) {
      for (int s = 0; s < kSums; ++s) add(i + s, sums[s]);
    }
    for (int s = 0; i < count; ++i, ++s) add(i, sums[s]);
  }
  [[nodiscard]] Simd::Vec total(int v) const {
    return Simd::add(Simd::add(sums[0][v], sums[1][v]), Simd::add(sums[2][v], sums[3][v]));
  }

  std::int64_t lanes;
  Simd::Vec sums[kSums][kVectors];
};

/// gated_delta for the vectors of columns from `column` on.
template <int kVectors, bool kIsWhole>
inline void gated_delta_columns(const GatedDelta& delta, std::int64_t column, std::int64_t lanes) {
  StateColumns<kVectors, kIsWhole> columns{lanes, {}};
  float* state = delta.state + column;
  for (std::int64_t row = 0; row < delta.rows; ++row) {
    const float* key = delta.key + row * delta.stride;
    const float* query = delta.query + row * delta.stride;
    const float* value = delta.value + row * delta.stride + column;
    const Simd::Vec decay = Simd::set(delta.decay[row * delta.gate_stride]);
    const Simd::Vec beta = Simd::set(delta.beta[row * delta.gate_stride]);
    columns.sum_elements(delta.key_dim, [&](std::int64_t i, Simd::Vec* sum) {
      const Simd::Vec k = Simd::set(key[i]);
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = Simd::fma(k, columns.load(state + i * delta.state_stride, v), sum[v]);
      }
    });
    Simd::Vec change[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Simd::Vec known = Simd::mul(decay, columns.total(v));
      change[v] = Simd::mul(Simd::sub(columns.load(value, v), known), beta);
    }
    columns.sum_elements(delta.key_dim, [&](std::int64_t i, Simd::Vec* sum) {
      const Simd::Vec k = Simd::set(key[i]);
      const Simd::Vec q = Simd::set(query[i]);
      float* element = state + i * delta.state_stride;
      for (int v = 0; v < kVectors; ++v) {
        const Simd::Vec next = Simd::fma(k, change[v], Simd::mul(columns.load(element, v), decay));
        columns.store(element, v, next);
        sum[v] = Simd::fma(q, next, sum[v]);
      }
    });
    float* out = delta.out + row * delta.out_stride + column;
    for (int v = 0; v < kVectors; ++v) columns.store(out, v, columns.total(v));
  }
}

/// selective_scan for the vectors of columns from `column` on.
template <int kVectors, bool kIsWhole>
inline void selective_scan_columns(const SelectiveScan& scan, std::int64_t column, std::int64_t lanes) {
  StateColumns<kVectors, kIsWhole> columns{lanes, {}};
  const Simd::Vec skip = Simd::set(scan.skip);
  float* state = scan.state + column;
  for (std::int64_t row = 0; row < scan.rows; ++row) {
    const float* b = scan.b + row * scan.stride;
    const float* c = scan.c + row * scan.stride;
    const float* x = scan.x + row * scan.stride + column;
    const float step = scan.time[row * scan.stride];
    const Simd::Vec time = Simd::set(step);
    const Simd::Vec decay = Simd::set(std::exp(scan.rate * step));
    Simd::Vec change[kVectors];
    for (int v = 0; v < kVectors; ++v) change[v] = Simd::mul(columns.load(x, v), time);
    columns.sum_elements(scan.state_dim, [&](std::int64_t i, Simd::Vec* sum) {
      const Simd::Vec in = Simd::set(b[i]);
      const Simd::Vec read = Simd::set(c[i]);
      float* element = state + i * scan.state_stride;
      for (int v = 0; v < kVectors; ++v) {
        const Simd::Vec next = Simd::fma(in, change[v], Simd::mul(columns.load(element, v), decay));
        columns.store(element, v, next);
        sum[v] = Simd::fma(read, next, sum[v]);
      }
    });
    float* out = scan.out + row * scan.out_stride + column;
    for (int v = 0; v < kVectors; ++v) {
      columns.store(out, v, Simd::fma(skip, columns.load(x, v), columns.total(v)));
    }
  }
}

inline void selective_scan(const SelectiveScan& scan) {
  std::int64_t column = 0;
  for (; column + 2 * Simd::kLanes <= scan.width; column += 2 * Simd::kLanes) {
    selective_scan_columns<2, true>(scan, column, Simd::kLanes);
  }
  for (; column < scan.width; column += Simd::kLanes) {
    selective_scan_columns<1, false>(scan, column, std::min<std::int64_t>(Simd::kLanes, scan.width - column));
  }
}

inline void gated_delta(const GatedDelta& delta) {
  std::int64_t column = 0;
  for (; column + 2 * Simd::kLanes <= delta.width; column += 2 * Simd::kLanes) {
    gated_delta_columns<2, true>(delta, column, Simd::kLanes);
  }
  for (; column < delta.width; column += Simd::kLanes) {
    gated_delta_columns<1, false>(delta, column, std::min<std::int64_t>(Simd::kLanes, delta.width - column));
  }
}

}  // namespace
}  // namespace adaptrt
