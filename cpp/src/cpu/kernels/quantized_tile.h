#pragma once

// Multiplies a tile of rows by a panel of integers, one group of inputs after another. Included after
// simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "elementwise.h"
#include "gemm.h"
#include "narrow_weights.h"
#include "quantized_weights.h"

namespace adaptrt {
namespace {

/// A group of a panel's inputs, with the addresses of its scales, and of its zero points or minimums.
struct GroupView {
  std::int64_t first;
  std::int64_t end;
  const std::byte* scales;    // [width]
  const std::byte* zeros;     // [width], or nullptr
  const std::byte* minimums;  // [width], or nullptr
};

/// The parts of the product's panel, with the scales that are used.
inline QuantizedPanel parts_of(const QuantizedGemm& gemm) {
  QuantizedPanel panel = parts_of_panel(gemm.quantization, gemm.call.panel, gemm.call.k, gemm.call.width);
  if (gemm.scales != nullptr) panel.scales = reinterpret_cast<const std::byte*>(gemm.scales);
  return panel;
}

inline std::int64_t group_size_of(const QuantizedGemm& gemm) {
  return gemm.quantization.group_size == 0 ? gemm.call.k : gemm.quantization.group_size;
}

inline DType scale_type_of(const Quantization& quantization) {
  return has_typed_scales(quantization) ? quantization.scale_type : DType::kFloat32;
}

inline GroupView group_of(const QuantizedGemm& gemm, const QuantizedPanel& panel, std::int64_t group) {
  const std::int64_t size = group_size_of(gemm);
  const std::int64_t at = group * gemm.call.width;
  const std::int64_t scales_at = at * static_cast<std::int64_t>(size_of(scale_type_of(gemm.quantization)));
  return {group * size, std::min((group + 1) * size, gemm.call.k), panel.scales + scales_at,
          gemm.quantization.zero_points ? panel.extra + at : nullptr,
          gemm.quantization.minimums ? panel.extra + scales_at : nullptr};
}

/// Returns zero points minus middle_of_zeros(): decoded weights are lower than the stored ones by as much.
inline Simd::Vec load_zeros(const Quantization& quantization, const std::byte* zeros, std::int64_t column,
                            std::int64_t lanes) {
  return Simd::sub(Simd::load_uint8(zeros + column, lanes),
                   Simd::set(static_cast<float>(middle_of_zeros(quantization.algo))));
}

inline Simd::Vec load_scales(const Quantization& quantization, const std::byte* scales, std::int64_t column,
                             std::int64_t lanes) {
  return load_as(scales, scale_type_of(quantization), column, lanes);
}

/// Negative zeros, which the first group's sums are added to. This does not change their bits.
inline constexpr auto kNothing = [] {
  std::array<float, static_cast<std::size_t>(kTileVectors) * Simd::kLanes> nothing{};
  nothing.fill(-0.0F);
  return nothing;
}();

/// Multiplies kRows rows by kVectors vectors of columns; the last one has last_lanes columns. `words` are the
/// weights of `inputs` in the form of Weights. `prefetch` is a Prefetch or a PanelStream.
template <class Weights, int kRows, int kVectors, bool kPartial, int kLines, class Fetch>
void quantized_tile(const QuantizedGemm& gemm, const QuantizedPanel& panel, const Weights& words_decoder,
                    const std::byte* words, InputRange inputs, std::int64_t row, std::int64_t column,
                    std::int64_t last_lanes, Fetch prefetch) {
  using A = typename Weights::A;
  using B = typename Weights::B;
  using Vec = Simd::Vec;
  const Weights decoder = words_decoder;
  constexpr int kChains = chains_of(kVectors);
  constexpr int kUnits = Weights::kUnits;
  constexpr int kInterleave = Weights::kInterleave;
  // Number of words after which units go to the first chain again.
  constexpr int kRoundWords = kChains > kUnits ? kChains / kUnits : 1;
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Weights::kColumnBytes;
  const std::int64_t row_bytes = gemm.call.width * Weights::kColumnBytes;
  const std::int64_t groups = group_count(gemm.quantization, gemm.call.k);
  const std::int64_t size = group_size_of(gemm);
  const std::int64_t a_stride = gemm.call.a_stride;
  const std::byte* b = words + column * Weights::kColumnBytes;
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  for (std::int64_t first = inputs.begin; first < inputs.end;) {
    const std::int64_t index = first / size;
    const GroupView group = group_of(gemm, panel, index);
    const std::int64_t end = std::min(group.end, inputs.end);
    const A* a = static_cast<const A*>(gemm.call.a) + row * a_stride + first;
    Vec sums[kChains][kRows][kVectors];
    ADAPTRT_UNROLL
    for (int chain = 0; chain < kChains; ++chain) {
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[chain][r][v] = Simd::zero();
      }
    }
    if constexpr (kChains == 1) {
      if (first > group.first) {
        ADAPTRT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const float* out = gemm.call.out + (row + r) * gemm.call.out_stride + column;
          ADAPTRT_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            sums[0][r][v] = Simd::load(out + v * Simd::kLanes, lanes_of(v));
          }
        }
      }
    }
    /// Calls take(number in the word, weights) for each unit of the next word.
    const auto take_word = [&](auto take) __attribute__((always_inline)) {
      typename Weights::Word packed[kVectors];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        packed[v] = load_word<Weights>(b + v * kVectorBytes, row_bytes, lanes_of(v));
      }
      for_each_index<kUnits>([&](auto unit) __attribute__((always_inline)) {
        B columns[kVectors];
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) columns[v] = decoder.template decode<unit()>(packed[v]);
        take(unit(), columns);
      });
      ADAPTRT_UNROLL
      for (int line = 0; line < kWordLines<Weights>; ++line) prefetch_lines<kLines>(&prefetch);
      b += kWordLines<Weights> * row_bytes;
    };
    const auto multiply = [&](Vec(&sum)[kRows][kVectors], const B(&columns)[kVectors], std::int64_t unit,
                              auto broadcast) __attribute__((always_inline)) {
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto value = broadcast(a + r * a_stride + unit * kInterleave);
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Weights::multiply_add(value, columns[v], sum[r][v]);
      }
    };

    std::int64_t units = (end - first) / kInterleave;
    for (; units >= kRoundWords * kUnits; units -= kRoundWords * kUnits) {
      ADAPTRT_UNROLL
      for (int at = 0; at < kRoundWords; ++at) {
        take_word([&](int unit, const B(&columns)[kVectors]) __attribute__((always_inline)) {
          multiply(sums[(at * kUnits + unit) % kChains], columns, unit,
                   [](const A* from) __attribute__((always_inline)) { return Weights::broadcast(from); });
        });
        a += kUnits * kInterleave;
      }
    }
    if constexpr (!kHasWholeWords<Weights>) {
      // Units of words after the last whole round are stored in memory, so that a loop can multiply them.
      std::int64_t left = units + ((end - first) % kInterleave != 0 ? 1 : 0);
      ADAPTRT_UNROLL
      for (int at = 0; at < kRoundWords; ++at) {
        if (left <= 0) break;
        B waiting[kUnits][kVectors];
        take_word([&](int unit, const B(&columns)[kVectors]) __attribute__((always_inline)) {
          ADAPTRT_UNROLL
          for (int v = 0; v < kVectors; ++v) waiting[unit][v] = columns[v];
        });
        constexpr int kTogether = std::min(kUnits, kChains);
        for (int begin = 0; begin < kUnits && begin < left; begin += kTogether) {
          ADAPTRT_UNROLL
          for (int unit = 0; unit < kTogether; ++unit) {
            if (begin + unit >= left) break;
            multiply(sums[(at * kUnits + unit) % kChains], waiting[begin + unit], begin + unit,
                     [&](const A* from) __attribute__((always_inline)) {
                       return begin + unit < units ? Weights::broadcast(from) : Weights::broadcast_last(from);
                     });
          }
        }
        a += kUnits * kInterleave;
        units -= kUnits;
        left -= kUnits;
      }
    }

    first = end;
    if constexpr (kChains == 1) {
      if (end < group.end) {
        ADAPTRT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          float* out = gemm.call.out + (row + r) * gemm.call.out_stride + column;
          ADAPTRT_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            Simd::store(out + v * Simd::kLanes, sums[0][r][v], lanes_of(v));
          }
        }
        continue;
      }
    }
    // Copied, because the compiler must assume that stores change what `gemm` refers to.
    float* const to = gemm.call.out + row * gemm.call.out_stride + column;
    const std::int64_t to_stride = gemm.call.out_stride;
    const float* const before = index == 0 ? kNothing.data() : to;
    const std::int64_t before_stride = index == 0 ? 0 : to_stride;
    const float* const a_sums =
        gemm.quantization.needs_group_sums() ? gemm.a_sums + row * groups + index : nullptr;
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = lanes_of(v);
      const std::int64_t offset = v * Simd::kLanes;
      const Vec scale = load_scales(gemm.quantization, group.scales, column + offset, lanes);
      const auto finish = [&](auto change_sum, auto change_total) __attribute__((always_inline)) {
        ADAPTRT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          Vec sum = sums[0][r][v];
          if constexpr (kChains == 2) sum = Simd::add(sum, sums[1][r][v]);
          if constexpr (kChains == 4) {
            sum = Simd::add(Simd::add(sum, sums[1][r][v]), Simd::add(sums[2][r][v], sums[3][r][v]));
          }
          const Vec groups_before = Simd::load(before + r * before_stride + offset, lanes);
          const Vec total = Simd::fma(change_sum(sum, r), scale, groups_before);
          Simd::store(to + r * to_stride + offset, change_total(total, r), lanes);
        }
      };
      const auto same = [](Vec sum, int) __attribute__((always_inline)) { return sum; };
      if (a_sums == nullptr) {
        finish(same, same);
      } else if (group.minimums != nullptr) {
        const Vec middle = Simd::set(static_cast<float>(middle_of_minimums(gemm.quantization)));
        const Vec minimum = load_scales(gemm.quantization, group.minimums, column + offset, lanes);
        const auto with_middle = [&](Vec sum, int r) __attribute__((always_inline)) {
          return Simd::fma(Simd::set(a_sums[r * groups]), middle, sum);
        };
        const auto less_minimum = [&](Vec total, int r) __attribute__((always_inline)) {
          return Simd::fma(Simd::set(-a_sums[r * groups]), minimum, total);
        };
        finish(with_middle, less_minimum);
      } else {
        const Vec zero = load_zeros(gemm.quantization, group.zeros, column + offset, lanes);
        const Vec negated = Simd::sub(Simd::set(-0.0F), zero);
        const auto less_zero = [&](Vec sum, int r) __attribute__((always_inline)) {
          return Simd::fma(Simd::set(a_sums[r * groups]), negated, sum);
        };
        finish(less_zero, same);
      }
    }
  }
}

/// Multiplies `rows` rows (at most kRows) by a whole group of columns.
template <class Weights, int kLines, int kRows, class Fetch>
void quantized_rows(const QuantizedGemm& gemm, const QuantizedPanel& panel, const Weights& decoder,
                    const std::byte* words, InputRange inputs, std::int64_t row, std::int64_t rows,
                    std::int64_t column, Fetch prefetch) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      quantized_rows<Weights, kLines, kRows - 1>(gemm, panel, decoder, words, inputs, row, rows, column,
                                                 prefetch);
      return;
    }
  }
  quantized_tile<Weights, kRows, kTileVectors, false, kLines>(gemm, panel, decoder, words, inputs, row,
                                                              column, Simd::kLanes, prefetch);
}

}  // namespace
}  // namespace adaptrt
