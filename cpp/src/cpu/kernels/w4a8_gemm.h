#pragma once

// Products of int8 activations and integers of few bits. Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "elementwise.h"
#include "gemm.h"
#include "narrow_weights.h"
#include "panel_stream.h"

namespace adaptrt {
namespace {

/// Words of a panel of kBits bits. quad() returns u of four inputs of each output as bytes, in the order of
/// int8_order().
template <int kBits>
class ByteWords {
  using Words = NarrowWords<kBits>;

 public:
  static constexpr std::int64_t kInputs = Words::kInputs;
  static constexpr int kQuads = Words::kInputs / 4;
  static constexpr int kLines = Words::kLines;
  static constexpr std::int64_t kColumnBytes = Words::kColumnBytes;

  explicit ByteWords(const std::byte* from, std::int64_t line_bytes, std::int64_t lanes)
      : word_(Words::load(from, line_bytes, lanes)) {}

  template <int kQuad>
  [[nodiscard]] Simd::Words quad() const {
    constexpr InputPairs kPairs = pairs_of_quad(kBits, kQuad);
    if constexpr (kBits != 3) {
      constexpr std::uint32_t kMask = kBits == 4 ? 0x0f0f0f0fU : 0x03030303U;
      return Simd::bits_of(Simd::shift_right<kBits * kPairs.low>(word_.lines[0]), kMask);
    } else {
      constexpr int kLow = Words::shift_of(kPairs.low);
      constexpr int kHigh = Words::shift_of(kPairs.high);
      const Simd::Words low = Words::template words_of<kPairs.low>(word_);
#ifdef __AVX512VBMI__
      if constexpr (kPairs.low / kThreeBitPairs == kPairs.high / kThreeBitPairs &&
                    kPairs.high < kLines * kThreeBitPairs) {
        return Simd::bits_of(four_bytes<kLow, kHigh>(low), 0x07070707U);
      }
#endif
      constexpr int kToUpperByte = 8;
      const Simd::Words high = Words::template words_of<kPairs.high>(word_);
      return Simd::merge_bits(Simd::shift_right<kLow>(low), 0x00070007U,
                              Simd::shift_right<kHigh - kToUpperByte>(high), 0x07000700U);
    }
  }

 private:
#ifdef __AVX512VBMI__
  /// For each half of a word, returns its eight bits from kLow on in the lower byte, and its eight bits from
  /// kHigh on in the upper byte.
  template <std::uint64_t kLow, std::uint64_t kHigh>
  static Simd::Words four_bytes(Simd::Words words) {
    constexpr std::uint64_t kOfWord = kLow | kHigh << 8 | (16 + kLow) << 16 | (16 + kHigh) << 24;
    constexpr std::uint64_t kBitsOfWord = 0x20202020;
    constexpr std::uint64_t kOfTwo = kOfWord | (kOfWord + kBitsOfWord) << 32;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<long long>(kOfTwo)), words);
  }
#endif

  typename Words::Word word_;
};

/// Calls body(std::integral_constant<int, bits>).
template <class Body>
void with_number_of_bits(const Quantization& how, const Body& body) {
  switch (how.bits) {
    case 2:
      return body(std::integral_constant<int, 2>{});
    case 3:
      return body(std::integral_constant<int, 3>{});
    default:
      return body(std::integral_constant<int, 4>{});
  }
}

/// A group of the inputs of one panel of kW4A8.
struct W4A8Group {
  W4A8Group(const W4A8Gemm& gemm, const QuantizedPanel& panel, std::int64_t number)
      : index(number),
        first(number * size_of_groups(gemm)),
        end(std::min(first + size_of_groups(gemm), gemm.call.k)),
        scales(panel.scales +
               number * gemm.call.width * static_cast<std::int64_t>(size_of(gemm.quantization.scale_type))),
        zeros(panel.extra == nullptr ? nullptr : panel.extra + number * gemm.call.width) {}

  static std::int64_t size_of_groups(const W4A8Gemm& gemm) {
    return gemm.quantization.group_size == 0 ? gemm.call.k : gemm.quantization.group_size;
  }

  std::int64_t index;
  std::int64_t first;
  std::int64_t end;
  const std::byte* scales;  // [width]
  const std::byte* zeros;   // [width], or nullptr
};

/// Returns the sum of q * (u - zero) as float32. `sum` is that of q * u. Ignores `zeros` without zero points.
inline Simd::Vec without_zeros(const W4A8Gemm& gemm, const W4A8Group& group, std::int64_t row,
                               Simd::Words zeros, Simd::Words sum) {
  const std::int64_t groups = group_count(gemm.quantization, gemm.call.k);
  const std::int32_t activations = gemm.a_sums[row * groups + group.index];
  const Simd::Words of_zeros =
      group.zeros == nullptr
          ? Simd::set_words(static_cast<std::uint32_t>(activations * (1 << (gemm.quantization.bits - 1))))
          : Simd::multiply_words(zeros, Simd::set_words(static_cast<std::uint32_t>(activations)));
  return Simd::words_to_floats(Simd::subtract_words(sum, of_zeros));
}

/// Multiplies kRows rows by kVectors vectors of columns; the last one has last_lanes columns. `inputs` are
/// whole groups, or a part of the only group; then `out` holds integers between parts. `prefetch` is a
/// Prefetch, a PanelStream or a StepPrefetch.
template <int kBits, int kRows, int kVectors, bool kPartial, int kLines, class Fetch>
void w4a8_tile(const W4A8Gemm& gemm, const QuantizedPanel& panel, InputRange inputs, std::int64_t row,
               std::int64_t column, std::int64_t last_lanes, Fetch prefetch) {
  using Word = ByteWords<kBits>;
  // Integers may be added in any order. With two sums for each element, additions do not wait for each other.
  constexpr int kChains = kRows * kVectors <= 4 && Word::kQuads % 2 == 0 ? 2 : 1;
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Word::kColumnBytes;
  const std::int64_t line_bytes = gemm.call.width * Word::kColumnBytes;
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  const auto out_of = [&](int r) { return gemm.call.out + (row + r) * gemm.call.out_stride + column; };
  const std::int8_t* a =
      static_cast<const std::int8_t*>(gemm.call.a) + row * gemm.call.a_stride + inputs.begin;
  const std::byte* b =
      panel.weights + inputs.begin / Word::kInputs * Word::kLines * line_bytes + column * Word::kColumnBytes;
  for (std::int64_t first = inputs.begin; first < inputs.end;) {
    const W4A8Group group(gemm, panel, first / W4A8Group::size_of_groups(gemm));
    const std::int64_t end = std::min(group.end, inputs.end);
    Simd::Words sums[kChains][kRows][kVectors];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[0][r][v] =
            first == group.first
                ? Simd::zero_words()
                : Simd::load_words(reinterpret_cast<const std::byte*>(out_of(r)) + v * kVectorBytes,
                                   lanes_of(v));
        if constexpr (kChains == 2) sums[1][r][v] = Simd::zero_words();
      }
    }
    for (; first < end; first += Word::kInputs) {
      Simd::FewBitsDot dots[kRows][kVectors];
      const auto words = [&]<int... kVector>(std::integer_sequence<int, kVector...>) {
        return std::array<Word, kVectors>{Word(b + kVector * kVectorBytes, line_bytes, lanes_of(kVector))...};
      }(std::make_integer_sequence<int, kVectors>{});
      const auto multiply = [&]<int kQuad>(std::integral_constant<int, kQuad>)
                                __attribute__((always_inline)) {
                                  Simd::Words columns[kVectors];
                                  ADAPTRT_UNROLL
                                  for (int v = 0; v < kVectors; ++v)
                                    columns[v] = words[v].template quad<kQuad>();
                                  ADAPTRT_UNROLL
                                  for (int r = 0; r < kRows; ++r) {
                                    std::uint32_t four = 0;
                                    std::memcpy(&four, a + r * gemm.call.a_stride + 4 * kQuad, sizeof(four));
                                    const Simd::Words value = Simd::set_words(four);
                                    ADAPTRT_UNROLL
                                    for (int v = 0; v < kVectors; ++v) {
                                      dots[r][v].add(&sums[kQuad % kChains][r][v], columns[v], value);
                                    }
                                  }
                                };
      [&]<int... kQuad>(std::integer_sequence<int, kQuad...>) __attribute__((always_inline)) {
        (multiply(std::integral_constant<int, kQuad>{}), ...);
      }(std::make_integer_sequence<int, Word::kQuads>{});
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) dots[r][v].finish(&sums[0][r][v]);
      }
      ADAPTRT_UNROLL
      for (int line = 0; line < Word::kLines; ++line) prefetch_lines<kLines>(&prefetch);
      a += Word::kInputs;
      b += Word::kLines * line_bytes;
    }
    first = end;
    const auto sum_of = [&](int r, int v) __attribute__((always_inline)) {
      if constexpr (kChains == 2) return Simd::add_words(sums[0][r][v], sums[1][r][v]);
      return sums[0][r][v];
    };
    if (end < group.end) {
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          Simd::store_words(reinterpret_cast<std::byte*>(out_of(r)) + v * kVectorBytes, sum_of(r, v),
                            lanes_of(v));
        }
      }
      continue;
    }
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = lanes_of(v);
      const std::int64_t offset = column + v * Simd::kLanes;
      const Simd::Vec scale = load_as(group.scales, gemm.quantization.scale_type, offset, lanes);
      const Simd::Words zeros =
          group.zeros == nullptr ? Simd::zero_words() : Simd::load_bytes(group.zeros + offset, lanes);
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* to = out_of(r) + v * Simd::kLanes;
        const Simd::Vec before = group.index == 0 ? Simd::zero() : Simd::load(to, lanes);
        const Simd::Vec integers = without_zeros(gemm, group, row + r, zeros, sum_of(r, v));
        Simd::Vec value = Simd::fma(integers, scale, before);
        if (end == gemm.call.k) value = Simd::mul(value, Simd::set(gemm.a_scales[row + r]));
        Simd::store(to, value, lanes);
      }
    }
  }
}

/// Multiplies `rows` rows, at most kRows.
template <int kBits, int kVectors, bool kPartial, int kLines, int kRows = kTileRows, class Fetch>
void w4a8_rows(const W4A8Gemm& gemm, const QuantizedPanel& panel, InputRange inputs, std::int64_t row,
               std::int64_t rows, std::int64_t column, std::int64_t last_lanes, Fetch prefetch) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      w4a8_rows<kBits, kVectors, kPartial, kLines, kRows - 1>(gemm, panel, inputs, row, rows, column,
                                                              last_lanes, prefetch);
      return;
    }
  }
  w4a8_tile<kBits, kRows, kVectors, kPartial, kLines>(gemm, panel, inputs, row, column, last_lanes, prefetch);
}

/// Multiplies all rows and columns. fetch(column) returns the prefetch for a group of whole vectors of
/// columns from `column` on, which the first tile of rows uses.
template <int kBits, class MakeFetch>
void w4a8_panel(const W4A8Gemm& gemm, const QuantizedPanel& panel, InputRange inputs,
                const MakeFetch& fetch) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  constexpr int kLines =
      static_cast<int>((kGroup * ByteWords<kBits>::kColumnBytes + kCacheLine - 1) / kCacheLine);
  const std::int64_t tiles = (gemm.call.rows + kTileRows - 1) / kTileRows;
  std::int64_t column = 0;
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    for (std::int64_t row = 0, tile = 0; tile < tiles; ++tile) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, tiles - tile);
      if (tile == 0) {
        w4a8_rows<kBits, kTileVectors, false, kLines>(gemm, panel, inputs, row, rows, column, Simd::kLanes,
                                                      fetch(column));
      } else {
        w4a8_rows<kBits, kTileVectors, false, 0>(gemm, panel, inputs, row, rows, column, Simd::kLanes,
                                                 Prefetch{});
      }
      row += rows;
    }
  }
  // Few matrices have such columns, in their last panel.
  for (; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    for (std::int64_t row = 0; row < gemm.call.rows; ++row) {
      w4a8_tile<kBits, 1, 1, true, 0>(gemm, panel, inputs, row, column, lanes, Prefetch{});
    }
  }
}

inline InputRange inputs_of(const W4A8Gemm& gemm) {
  return gemm.call.part.value_or(InputRange{0, gemm.call.k});
}

inline void w4a8_gemm(const W4A8Gemm& gemm) {
  const QuantizedPanel panel =
      parts_of_panel(gemm.quantization, gemm.call.panel, gemm.call.k, gemm.call.width);
  with_number_of_bits(gemm.quantization, [&]<int kBits>(std::integral_constant<int, kBits>) {
    constexpr std::int64_t kColumnBytes = ByteWords<kBits>::kColumnBytes;
    w4a8_panel<kBits>(gemm, panel, inputs_of(gemm), [&](std::int64_t column) {
      return stream_of_columns(panel, column, gemm.call.width, kColumnBytes, gemm.call.next_panel);
    });
  });
}

inline void arrange_int8_row(std::uint8_t* row, std::int64_t n, const Quantization& how, std::int32_t* sums) {
  const auto order = int8_order(how.bits);
  const std::int64_t end = (n + kOrderedInputs - 1) / kOrderedInputs * kOrderedInputs;
  std::memset(row + n, 0x80, static_cast<std::size_t>(end - n));
  for (std::int64_t i = 0; i < end; i += kOrderedInputs) Simd::reorder_bytes(row + i, order.data());
  for (std::int64_t i = 0; i < end; ++i) row[i] ^= 0x80U;
  const std::int64_t size = how.group_size == 0 ? n : how.group_size;
  for (std::int64_t first = 0; first < n; first += size) {
    // The last group includes the padding, which is zero: int8_order() may have moved inputs there.
    const std::int64_t last = first + size < n ? first + size : end;
    std::int32_t sum = 0;
    for (std::int64_t i = first; i < last; ++i) sum += static_cast<std::int8_t>(row[i]);
    *sums++ = sum;
  }
}

}  // namespace
}  // namespace adaptrt
