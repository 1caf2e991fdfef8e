#pragma once

// Products of 16-bit activations and integers of eight bits or fewer. Included after simd_*.h and gemm.h;
// gemm.h says why.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/int16_spans.h"
#include "adaptrt/cpu/kernel_table.h"
#include "elementwise.h"
#include "gemm.h"
#include "narrow_weights.h"
#include "panel_stream.h"

namespace adaptrt {
namespace {

/// Words that are one pair of inputs of each column, as int16.
struct OnePair {
  using Word = Simd::Words;
  static constexpr int kPairs = 1;
  static constexpr int kLines = 1;
  template <int kPair>
  static Simd::Words pair(const Word& word) {
    return word;
  }
};

/// Words of int8.
struct Int16Bytes : OnePair {
  static constexpr std::int64_t kColumnBytes = 2;
  static Word load(const std::byte* from, std::int64_t /*line_bytes*/, std::int64_t n) {
    return Simd::load_int8_as_int16(from, n);
  }
};

/// Words of kBits bits, whose integers are not centred.
template <int kBits>
struct Int16Words : NarrowWords<kBits> {
  using Words = NarrowWords<kBits>;
  using typename Words::Word;
  static constexpr int kPairs = Words::kInputs / 2;
  template <int kPair>
  static Simd::Words pair(const Word& word) {
    constexpr std::uint32_t kMask = ((1U << kBits) - 1U) * 0x10001U;
    if constexpr (kBits == 4) {
      return Simd::bits_of(Simd::shift_right<4 * kPair>(word.lines[0]), kMask);
    } else {
      return Simd::bits_of(Simd::shift_right<Words::shift_of(kPair)>(Words::template words_of<kPair>(word)),
                           kMask);
    }
  }
};

/// Pairs of int16 that decode_words() stored.
struct Int16Pairs : OnePair {
  static constexpr std::int64_t kColumnBytes = 4;
  static Word load(const std::byte* from, std::int64_t /*line_bytes*/, std::int64_t n) {
    return Simd::load_words(from, n);
  }
};

/// Goes through the spans of a panel's inputs. It has copies of all that it needs: the compiler must assume
/// that storing outputs changes what an Int16Gemm refers to.
class SpanWalk {
 public:
  SpanWalk(const Int16Gemm& gemm, const QuantizedPanel& panel)
      : scale_type_(has_typed_scales(gemm.quantization) ? gemm.quantization.scale_type : DType::kFloat32),
        width_(gemm.call.width),
        scale_bytes_(width_ * static_cast<std::int64_t>(size_of(scale_type_))),
        span_(gemm.quantization, gemm.call.k),
        scales_(panel.scales),
        zeros_(gemm.quantization.zero_points ? panel.extra : nullptr),
        minimums_(gemm.quantization.minimums ? panel.extra : nullptr),
        middle_of_zeros_(has_few_bits(gemm.quantization.algo) ? 0 : middle_of_zeros(gemm.quantization.algo)) {
    const bool is_centred =
        zeros_ != nullptr || minimums_ != nullptr || !has_few_bits(gemm.quantization.algo);
    centre_ = is_centred ? 0 : 1 << (gemm.quantization.bits - 1);
  }

  [[nodiscard]] std::int64_t first() const { return span_.first(); }
  [[nodiscard]] std::int64_t end() const { return span_.end(); }
  [[nodiscard]] std::int64_t index() const { return span_.index(); }

  void next() {
    if (!span_.next()) return;
    scales_ += scale_bytes_;
    if (zeros_ != nullptr) zeros_ += width_;
    if (minimums_ != nullptr) minimums_ += scale_bytes_;
  }

  /// The number that all integers are above their value.
  [[nodiscard]] std::int32_t centre() const { return centre_; }
  [[nodiscard]] bool has_zeros() const { return zeros_ != nullptr; }
  [[nodiscard]] bool has_minimums() const { return minimums_ != nullptr; }
  [[nodiscard]] Simd::Vec scales(std::int64_t column, std::int64_t lanes) const {
    return load_as(scales_, scale_type_, column, lanes);
  }
  [[nodiscard]] Simd::Vec minimums(std::int64_t column, std::int64_t lanes) const {
    return load_as(minimums_, scale_type_, column, lanes);
  }
  /// Numbers that the integers of each column are above their values.
  [[nodiscard]] Simd::Words zeros(std::int64_t column, std::int64_t lanes) const {
    return Simd::subtract_words(Simd::load_bytes(zeros_ + column, lanes), Simd::set_words(middle_of_zeros_));
  }

 private:
  DType scale_type_;
  std::int64_t width_;
  std::int64_t scale_bytes_;
  InputSpan span_;
  const std::byte* scales_;
  const std::byte* zeros_;
  const std::byte* minimums_;
  std::uint32_t middle_of_zeros_;
  std::int32_t centre_ = 0;
};

/// Prefetches lines, some at a time.
class LineFetcher {
 public:
  LineFetcher() = default;
  LineFetcher(const std::byte* from, std::int64_t stride, std::int64_t count)
      : from_(from), stride_(stride), left_(from == nullptr ? 0 : count) {}

  void fetch(std::int64_t lines) {
    for (; lines > 0 && left_ > 0; --lines, --left_, from_ += stride_) __builtin_prefetch(from_, 0, 3);
  }

 private:
  const std::byte* from_ = nullptr;
  std::int64_t stride_ = 0;
  std::int64_t left_ = 0;
};

/// The totals before the first span. They do not change the bits of what is added to them.
inline constexpr auto kNoTotals = [] {
  std::array<float, kPanelColumns> nothing{};
  nothing.fill(-0.0F);
  return nothing;
}();

/// The weights that a tile multiplies: words of a column group, from the first input of a span on.
struct Int16Operand {
  const std::byte* words;
  std::int64_t line_bytes;
};

/// Multiplies kRows rows by kVectors vectors of columns; the last one has last_lanes columns. The inputs are
/// the spans from `walk` to `end`. `prefetch` is a Prefetch or a PanelStream. `before_span` is called once
/// for each span.
template <class Packed, int kRows, int kVectors, bool kPartial, int kLines, class Fetch, class BeforeSpan>
void int16_tile(const Int16Gemm& gemm, SpanWalk walk, std::int64_t end, const Int16Operand& operand,
                std::int64_t row, std::int64_t column, std::int64_t last_lanes, Fetch prefetch,
                const BeforeSpan& before_span) {
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Packed::kColumnBytes;
  constexpr std::int64_t kWordInputs = 2 * Packed::kPairs;
  const std::int64_t spans = gemm.spans;
  const std::int64_t a_stride = gemm.call.a_stride;
  const std::int64_t line_bytes = operand.line_bytes;
  const auto* a = static_cast<const std::int16_t*>(gemm.call.a) + row * a_stride + walk.first();
  const float* const a_scales = gemm.a_scales + row * spans;
  const std::int32_t* const a_sums = gemm.a_sums + row * spans;
  const std::byte* b = operand.words;
  float* const to = gemm.call.out + row * gemm.call.out_stride + column;
  const std::int64_t to_stride = gemm.call.out_stride;
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  while (walk.first() < end) {
    before_span();
    Simd::Int16Sums sums[kRows][kVectors];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const std::int32_t above = -walk.centre() * a_sums[r * spans + walk.index()];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Simd::int16_sums(Simd::set_words(static_cast<std::uint32_t>(above)));
      }
    }
    const auto input_pair = [&](int r, int pair) __attribute__((always_inline)) {
      std::uint32_t two = 0;
      std::memcpy(&two, a + r * a_stride + 2 * pair, sizeof(two));
      return Simd::set_words(two);
    };
    for (std::int64_t words = (walk.end() - walk.first() + kWordInputs - 1) / kWordInputs; words > 0;
         --words) {
      if constexpr (kRows == 1) {
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const auto word = Packed::load(b + v * kVectorBytes, line_bytes, lanes_of(v));
          for_each_index<Packed::kPairs>([&](auto pair) __attribute__((always_inline)) {
            sums[0][v] =
                Simd::dot_int16(sums[0][v], input_pair(0, pair()), Packed::template pair<pair()>(word));
          });
        }
      } else {
        typename Packed::Word packed[kVectors];
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          packed[v] = Packed::load(b + v * kVectorBytes, line_bytes, lanes_of(v));
        }
        for_each_index<Packed::kPairs>([&](auto pair) __attribute__((always_inline)) {
          Simd::Words columns[kVectors];
          ADAPTRT_UNROLL
          for (int v = 0; v < kVectors; ++v) columns[v] = Packed::template pair<pair()>(packed[v]);
          ADAPTRT_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const Simd::Words value = input_pair(r, pair());
            ADAPTRT_UNROLL
            for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::dot_int16(sums[r][v], value, columns[v]);
          }
        });
      }
      ADAPTRT_UNROLL
      for (int line = 0; line < Packed::kLines; ++line) prefetch_lines<kLines>(&prefetch);
      a += kWordInputs;
      b += Packed::kLines * line_bytes;
    }

    const float* const before = walk.index() == 0 ? kNoTotals.data() : to;
    const std::int64_t before_stride = walk.index() == 0 ? 0 : to_stride;
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = lanes_of(v);
      const std::int64_t offset = v * Simd::kLanes;
      const Simd::Vec scale = walk.scales(column + offset, lanes);
      const auto sum = [&](int r) __attribute__((always_inline)) { return Simd::words_of(sums[r][v]); };
      // A factor that is a power of two rounds nothing, so this fma has the bits of a product and a sum.
      const auto finish = [&](auto scaled) __attribute__((always_inline)) {
        ADAPTRT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const Simd::Vec total = Simd::fma(scaled(r), Simd::set(a_scales[r * spans + walk.index()]),
                                            Simd::load(before + r * before_stride + offset, lanes));
          Simd::store(to + r * to_stride + offset, total, lanes);
        }
      };
      const auto a_sum = [&](int r) __attribute__((always_inline)) {
        return Simd::set_words(static_cast<std::uint32_t>(a_sums[r * spans + walk.index()]));
      };
      if (walk.has_zeros()) {
        const Simd::Words zeros = walk.zeros(column + offset, lanes);
        finish([&](int r) __attribute__((always_inline)) {
          const Simd::Words excess = Simd::multiply_words(zeros, a_sum(r));
          return Simd::mul(Simd::words_to_floats(Simd::subtract_words(sum(r), excess)), scale);
        });
      } else if (walk.has_minimums()) {
        const Simd::Vec minimum = walk.minimums(column + offset, lanes);
        finish([&](int r) __attribute__((always_inline)) {
          return Simd::sub(Simd::mul(Simd::words_to_floats(sum(r)), scale),
                           Simd::mul(Simd::words_to_floats(a_sum(r)), minimum));
        });
      } else {
        finish([&](int r) __attribute__((always_inline)) {
          return Simd::mul(Simd::words_to_floats(sum(r)), scale);
        });
      }
    }
    walk.next();
  }
}

struct NothingBefore {
  void operator()() const {}
};

/// Multiplies a column group by rows that decode its words in registers, and prefetches the words.
template <class Packed, int kRows, int kVectors>
void int16_direct(const Int16Gemm& gemm, const QuantizedPanel& panel, std::int64_t row, std::int64_t column) {
  constexpr std::int64_t kGroupBytes = kVectors * Simd::kLanes * Packed::kColumnBytes;
  constexpr int kLines = static_cast<int>((kGroupBytes + kCacheLine - 1) / kCacheLine);
  const std::int64_t line_bytes = gemm.call.width * Packed::kColumnBytes;
  const std::byte* words = panel.weights + column * Packed::kColumnBytes;
  const bool is_last = column + 2 * kVectors * Simd::kLanes > gemm.call.width;
  const PanelStream stream(words, (panel.scales - panel.weights) / line_bytes, line_bytes,
                           is_last ? gemm.call.next_panel : words + kGroupBytes);
  int16_tile<Packed, kRows, kVectors, false, kLines>(gemm, SpanWalk(gemm, panel), gemm.call.k,
                                                     {words, line_bytes}, row, column, Simd::kLanes, stream,
                                                     NothingBefore{});
}

/// Number of vectors of columns that one row is multiplied by at a time.
inline constexpr int kRowVectors = static_cast<int>(std::min<std::int64_t>(8, kPanelColumns / Simd::kLanes));
/// Maximum number of rows that decode words in registers.
inline constexpr int kDirectRows = 3;

/// Multiplies `rows` rows, at most kRows, by decoded pairs.
template <int kRows, class BeforeSpan>
void int16_rows(const Int16Gemm& gemm, const SpanWalk& walk, std::int64_t end, const Int16Operand& decoded,
                std::int64_t row, std::int64_t rows, std::int64_t column, const BeforeSpan& before_span) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      int16_rows<kRows - 1>(gemm, walk, end, decoded, row, rows, column, before_span);
      return;
    }
  }
  int16_tile<Int16Pairs, kRows, kInt16TileVectors, false, 0>(gemm, walk, end, decoded, row, column,
                                                             Simd::kLanes, Prefetch{}, before_span);
}

/// Decodes `words` words of kInt16TileVectors vectors of columns to pairs.
template <class Packed>
void decode_words(const Int16Operand& from, std::int64_t words, std::byte* out) {
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Packed::kColumnBytes;
  constexpr std::int64_t kPairBytes = Simd::kLanes * Int16Pairs::kColumnBytes;
  const std::byte* b = from.words;
  for (; words > 0; --words) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kInt16TileVectors; ++v) {
      const auto word = Packed::load(b + v * kVectorBytes, from.line_bytes, Simd::kLanes);
      for_each_index<Packed::kPairs>([&](auto pair) __attribute__((always_inline)) {
        Simd::store_words(out + (pair() * kInt16TileVectors + v) * kPairBytes,
                          Packed::template pair<pair()>(word), Simd::kLanes);
      });
    }
    b += Packed::kLines * from.line_bytes;
    out += Packed::kPairs * kInt16TileVectors * kPairBytes;
  }
}

/// Multiplies a column group of kInt16TileVectors vectors by many rows. Some spans are decoded to the
/// first-level cache, and all rows are multiplied by them, before the next spans are decoded. Meanwhile the
/// tiles prefetch the words of the next spans.
template <class Packed>
void int16_decoded(const Int16Gemm& gemm, const QuantizedPanel& panel, std::int64_t column) {
  constexpr std::int64_t kGroup = kInt16TileVectors * Simd::kLanes;
  constexpr std::int64_t kPairLine = kGroup * Int16Pairs::kColumnBytes;
  constexpr std::int64_t kWordInputs = 2 * Packed::kPairs;
  constexpr std::int64_t kLevelBytes = 16384;
  constexpr std::int64_t kMostInputs = std::max(kMaxSpanInputs, kLevelBytes / kPairLine * 2);
  alignas(kCacheLine) std::byte decoded[static_cast<std::size_t>(kMostInputs / 2 * kPairLine)];
  const std::int64_t line_bytes = gemm.call.width * Packed::kColumnBytes;
  const std::int64_t tiles = (gemm.call.rows + kTileRows - 1) / kTileRows;
  const bool is_last_group = column + 2 * kGroup > gemm.call.width;
  const std::byte* words = panel.weights + column * Packed::kColumnBytes;
  const std::byte* const next_group =
      is_last_group ? gemm.call.next_panel : words + kGroup * Packed::kColumnBytes;
  SpanWalk walk(gemm, panel);
  while (walk.first() < gemm.call.k) {
    SpanWalk after = walk;
    std::int64_t spans = 0;
    while (after.first() < gemm.call.k && after.end() - walk.first() <= kMostInputs) {
      after.next();
      ++spans;
    }
    const std::int64_t lines =
        (after.first() - walk.first() + kWordInputs - 1) / kWordInputs * Packed::kLines;
    decode_words<Packed>({words, line_bytes}, lines / Packed::kLines, decoded);
    words += lines * line_bytes;
    LineFetcher fetcher(after.first() < gemm.call.k ? words : next_group, line_bytes, lines);
    const std::int64_t share = (lines + tiles * spans - 1) / (tiles * spans);
    for (std::int64_t row = 0, tile = 0; tile < tiles; ++tile) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, tiles - tile);
      int16_rows<kTileRows>(gemm, walk, after.first(), {decoded, kPairLine}, row, rows, column,
                            [&] { fetcher.fetch(share); });
      row += rows;
    }
    walk = after;
  }
}

template <class Packed>
void int16_panel(const Int16Gemm& gemm) {
  constexpr std::int64_t kGroup = kInt16TileVectors * Simd::kLanes;
  constexpr std::int64_t kRowGroup = kRowVectors * Simd::kLanes;
  const QuantizedPanel panel =
      parts_of_panel(gemm.quantization, gemm.call.panel, gemm.call.k, gemm.call.width);
  std::int64_t column = 0;
  if (gemm.call.rows == 1) {
    for (; column + kRowGroup <= gemm.call.width; column += kRowGroup) {
      int16_direct<Packed, 1, kRowVectors>(gemm, panel, 0, column);
    }
  }
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    switch (gemm.call.rows) {
      case 1:
        int16_direct<Packed, 1, kInt16TileVectors>(gemm, panel, 0, column);
        break;
      case 2:
        int16_direct<Packed, 2, kInt16TileVectors>(gemm, panel, 0, column);
        break;
      case kDirectRows:
        int16_direct<Packed, kDirectRows, kInt16TileVectors>(gemm, panel, 0, column);
        break;
      default:
        int16_decoded<Packed>(gemm, panel, column);
    }
  }
  // Few matrices have such columns, in their last panel.
  const std::int64_t line_bytes = gemm.call.width * Packed::kColumnBytes;
  for (; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    for (std::int64_t row = 0; row < gemm.call.rows; ++row) {
      int16_tile<Packed, 1, 1, true, 0>(gemm, SpanWalk(gemm, panel), gemm.call.k,
                                        {panel.weights + column * Packed::kColumnBytes, line_bytes}, row,
                                        column, lanes, Prefetch{}, NothingBefore{});
    }
  }
}

inline void int16_gemm(const Int16Gemm& gemm) {
  if (gemm.quantization.algo == QuantAlgo::kW8A16) return int16_panel<Int16Bytes>(gemm);
  switch (gemm.quantization.bits) {
    case 2:
      return int16_panel<Int16Words<2>>(gemm);
    case 3:
      return int16_panel<Int16Words<3>>(gemm);
    default:
      return int16_panel<Int16Words<4>>(gemm);
  }
}

/// Rounds a span without NaN or infinity, whose largest number has the bits `most` without its sign. Returns
/// the scale, a power of two.
inline float round_span(const std::byte* x, std::int64_t n, std::uint16_t most, std::int16_t* out) {
  constexpr int kExponentOfOne = 127;
  // Smaller spans would need a factor that float32 cannot represent.
  constexpr int kLeastExponent = -100;
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const auto power_of_two = [](int exponent) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + kExponentOfOne) << 23U);
  };
  const int exponent = std::max((most >> 7) - kExponentOfOne, kLeastExponent);
  const float factor = power_of_two(14 - exponent);
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, x + 2 * i, sizeof(bits));
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U) * factor;
    out[i] = static_cast<std::int16_t>(std::bit_cast<std::uint32_t>(value + kRounder));
  }
  return power_of_two(exponent - 14);
}

/// Replaces infinities by 1 and -1 and all other numbers by 0. Returns the scale: infinity, or NaN if there
/// is a NaN. So the products are what an infinite input makes of them.
inline float mark_infinities(const std::byte* x, std::int64_t n, std::int16_t* out) {
  constexpr std::uint16_t kInfinity = 0x7f80;
  bool is_number = true;
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, x + 2 * i, sizeof(bits));
    const auto magnitude = static_cast<std::uint16_t>(bits & 0x7fffU);
    is_number = is_number && magnitude <= kInfinity;
    out[i] = static_cast<std::int16_t>(magnitude != kInfinity ? 0 : bits == kInfinity ? 1 : -1);
  }
  return is_number ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
}

inline void round_to_int16(const std::byte* x, std::int64_t n, const Quantization& how, std::int16_t* out,
                           float* scales, std::int32_t* sums) {
  for (InputSpan span(how, n); span.first() < n; span.next()) {
    const std::byte* from = x + 2 * span.first();
    const std::int64_t count = span.end() - span.first();
    std::int16_t* to = out + span.first();
    std::uint16_t most = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, from + 2 * i, sizeof(bits));
      most = std::max(most, static_cast<std::uint16_t>(bits & 0x7fffU));
    }
    *scales++ = most < 0x7f80 ? round_span(from, count, most, to) : mark_infinities(from, count, to);
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += to[i];
    *sums++ = sum;
  }
  std::fill(out + n, out + padded_int16_inputs(n), std::int16_t{0});
}

}  // namespace
}  // namespace adaptrt
