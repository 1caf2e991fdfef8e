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

/// Goes through the groups of a panel that follow one another. It has copies of all that it needs: the
/// compiler must assume that storing outputs changes what a QuantizedGemm refers to.
class GroupWalk {
 public:
  /// Begins at the group of the input `first`.
  GroupWalk(const QuantizedGemm& gemm, const QuantizedPanel& panel, std::int64_t first)
      : scale_type_(scale_type_of(gemm.quantization)),
        has_sums_(gemm.quantization.needs_group_sums()),
        middle_(static_cast<float>(gemm.quantization.minimums ? middle_of_minimums(gemm.quantization)
                                                              : middle_of_zeros(gemm.quantization.algo))),
        k_(gemm.call.k),
        size_(group_size_of(gemm)),
        width_(gemm.call.width),
        scale_bytes_(width_ * static_cast<std::int64_t>(size_of(scale_type_))),
        index_(first / size_),
        group_(group_of(gemm, panel, index_)) {}

  void next() {
    ++index_;
    group_.first += size_;
    group_.end = std::min(group_.first + size_, k_);
    group_.scales += scale_bytes_;
    if (group_.zeros != nullptr) group_.zeros += width_;
    if (group_.minimums != nullptr) group_.minimums += scale_bytes_;
  }

  [[nodiscard]] const GroupView& group() const { return group_; }
  [[nodiscard]] std::int64_t index() const { return index_; }
  /// True if the products need the sums of the activations.
  [[nodiscard]] bool has_sums() const { return has_sums_; }
  [[nodiscard]] bool has_minimums() const { return group_.minimums != nullptr; }
  [[nodiscard]] Simd::Vec scales(std::int64_t column, std::int64_t lanes) const {
    return load_as(group_.scales, scale_type_, column, lanes);
  }
  /// The integer that sums of products with minimums lack, for each unit of the activations' sums.
  [[nodiscard]] Simd::Vec middle() const { return Simd::set(middle_); }
  [[nodiscard]] Simd::Vec negated_minimums(std::int64_t column, std::int64_t lanes) const {
    return negated(load_as(group_.minimums, scale_type_, column, lanes));
  }
  [[nodiscard]] Simd::Vec negated_zeros(std::int64_t column, std::int64_t lanes) const {
    return negated(Simd::sub(Simd::load_uint8(group_.zeros + column, lanes), middle()));
  }

 private:
  static Simd::Vec negated(Simd::Vec x) { return Simd::sub(Simd::set(-0.0F), x); }

  DType scale_type_;
  bool has_sums_;
  float middle_;
  std::int64_t k_;
  std::int64_t size_;
  std::int64_t width_;
  std::int64_t scale_bytes_;
  std::int64_t index_;
  GroupView group_;
};

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
  const std::int64_t a_stride = gemm.call.a_stride;
  const A* a = static_cast<const A*>(gemm.call.a) + row * a_stride + inputs.begin;
  float* const to = gemm.call.out + row * gemm.call.out_stride + column;
  const std::int64_t to_stride = gemm.call.out_stride;
  const float* const a_sums = gemm.a_sums;
  const std::byte* b = words + column * Weights::kColumnBytes;
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  GroupWalk walk(gemm, panel, inputs.begin);
  for (std::int64_t first = inputs.begin; first < inputs.end; walk.next()) {
    const GroupView& group = walk.group();
    const std::int64_t end = std::min(group.end, inputs.end);
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
          ADAPTRT_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            sums[0][r][v] = Simd::load(to + r * to_stride + v * Simd::kLanes, lanes_of(v));
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
          ADAPTRT_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            Simd::store(to + r * to_stride + v * Simd::kLanes, sums[0][r][v], lanes_of(v));
          }
        }
        continue;
      }
    }
    const float* const before = walk.index() == 0 ? kNothing.data() : to;
    const std::int64_t before_stride = walk.index() == 0 ? 0 : to_stride;
    const auto a_sum = [&](int r) __attribute__((always_inline)) {
      return Simd::set(a_sums[(row + r) * groups + walk.index()]);
    };
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = lanes_of(v);
      const std::int64_t offset = v * Simd::kLanes;
      const Vec scale = walk.scales(column + offset, lanes);
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
      if (!walk.has_sums()) {
        finish(same, same);
      } else if (walk.has_minimums()) {
        const Vec middle = walk.middle();
        const Vec negated = walk.negated_minimums(column + offset, lanes);
        finish([&](Vec sum, int r)
                   __attribute__((always_inline)) { return Simd::fma(a_sum(r), middle, sum); },
               [&](Vec total, int r)
                   __attribute__((always_inline)) { return Simd::fma(a_sum(r), negated, total); });
      } else {
        const Vec negated = walk.negated_zeros(column + offset, lanes);
        finish([&](Vec sum, int r)
                   __attribute__((always_inline)) { return Simd::fma(a_sum(r), negated, sum); },
               same);
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
