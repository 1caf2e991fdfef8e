#pragma once

// Included by the source of each instruction set, behind its simd_*.h and gemm.h, which says why. Panels of
// four bits that stand for numbers of a table: each weight becomes the number of the engine's type that it
// stands for, and is multiplied like one that was stored so, to the same bits.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/kernels/kernel_table.h"
#include "elementwise.h"
#include "gemm.h"
#include "quantized_weights.h"

namespace adaptrt {
namespace {

/// Inputs of a word that lie at kUnit of it, as products of numbers and scales.
template <int kUnit>
inline Simd::Pair coded_pair(Simd::Words words, Simd::Table table, Simd::Vec scale) {
  return {Simd::mul(Simd::look_up<4 * kUnit>(words, table), scale),
          Simd::mul(Simd::look_up<4 * kUnit + 16>(words, table), scale)};
}

/// Of what type the panels are that are made. put() writes two inputs of some outputs, which begin at `out`
/// and `line` bytes behind it.
struct CodedBFloat16 {
  using Weights = BFloat16Weights;
  static constexpr DType kType = DType::kBFloat16;
  /// Bytes of two inputs of an output.
  static constexpr std::int64_t kPairBytes = 4;
  template <DType>
  static void put(Simd::Pair pair, std::byte* out, std::int64_t, std::int64_t lanes) {
    Simd::store_words(out, Simd::round_to_pairs(pair.even, pair.odd), lanes);
  }
};

struct CodedFloat16 {
  using Weights = Float16Weights;
  static constexpr DType kType = DType::kFloat16;
  static constexpr std::int64_t kPairBytes = 4;
  template <DType>
  static void put(Simd::Pair pair, std::byte* out, std::int64_t line, std::int64_t lanes) {
    Simd::store_float16(out, pair.even, lanes);
    Simd::store_float16(out + line, pair.odd, lanes);
  }
};

struct CodedFloat32 {
  using Weights = Float32Weights;
  static constexpr DType kType = DType::kFloat32;
  static constexpr std::int64_t kPairBytes = 8;
  template <DType kValue>
  static void put(Simd::Pair pair, std::byte* out, std::int64_t line, std::int64_t lanes) {
    if constexpr (kValue == DType::kBFloat16) {
      pair = Simd::bfloat16_pairs(Simd::round_to_pairs(pair.even, pair.odd));
    }
    if constexpr (kValue == DType::kFloat16) {
      pair = {Simd::round_to_float16(pair.even), Simd::round_to_float16(pair.odd)};
    }
    Simd::store(reinterpret_cast<float*>(out), pair.even, lanes);
    Simd::store(reinterpret_cast<float*>(out + line), pair.odd, lanes);
  }
};

/// Makes a panel of the engine's type of one with a code, some inputs after the other.
template <class Made>
class CodeExpander {
 public:
  CodeExpander(const std::byte* panel, const Quantization& how, std::int64_t k, std::int64_t width)
      : how_(how),
        parts_(parts_of_panel(how, panel, k, width)),
        width_(width),
        scale_bytes_(static_cast<std::int64_t>(size_of(how.scale_type))),
        table_(Simd::load_table(code_table(how.code).data())) {}

  /// Inputs [begin, end), in whole words, to `out`, whose outputs are `columns` for each input.
  void expand(std::int64_t begin, std::int64_t end, std::byte* out, std::int64_t columns) const {
    if constexpr (Made::kType != DType::kFloat32) {
      expand_as<Made::kType>(begin, end, out, columns);
      return;
    }
    switch (how_.value_type) {
      case DType::kFloat32:
        expand_as<DType::kFloat32>(begin, end, out, columns);
        return;
      case DType::kFloat16:
        expand_as<DType::kFloat16>(begin, end, out, columns);
        return;
      case DType::kBFloat16:
        expand_as<DType::kBFloat16>(begin, end, out, columns);
        return;
    }
  }

 private:
  static constexpr std::int64_t kWordBytes = 4;
  static constexpr int kWordPairs = static_cast<int>(kInt4Inputs / 2);

  template <DType kValue>
  void expand_as(std::int64_t begin, std::int64_t end, std::byte* out, std::int64_t columns) const {
    constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
    for (std::int64_t first = begin; first < end;) {
      const std::int64_t group = first / how_.group_size;
      const std::int64_t last = std::min((group + 1) * how_.group_size, end);
      const Stretch stretch{parts_.weights + first / kInt4Inputs * width_ * kWordBytes,
                            parts_.scales + group * width_ * scale_bytes_, (last - first) / kInt4Inputs,
                            out + (first - begin) / 2 * columns * Made::kPairBytes, columns};
      std::int64_t column = 0;
      for (; column + kGroup <= width_; column += kGroup) {
        expand_columns<kValue, kTileVectors>(stretch, column, Simd::kLanes);
      }
      for (; column < width_; column += Simd::kLanes) {
        expand_columns<kValue, 1>(stretch, column, std::min<std::int64_t>(Simd::kLanes, width_ - column));
      }
      first = last;
    }
  }

  /// Inputs of one group.
  struct Stretch {
    const std::byte* words;
    const std::byte* scales;
    std::int64_t count;  ///< of words of an output
    std::byte* out;
    std::int64_t columns;
  };

  /// Of kVectors vectors of columns, the last one of last_lanes columns.
  template <DType kValue, int kVectors>
  void expand_columns(const Stretch& stretch, std::int64_t column, std::int64_t last_lanes) const {
    constexpr int kLines =
        static_cast<int>((kVectors * Simd::kLanes * kWordBytes + kCacheLine - 1) / kCacheLine);
    const auto lanes_of = [&](int v) { return v == kVectors - 1 ? last_lanes : std::int64_t{Simd::kLanes}; };
    const Simd::Table table = table_;
    Simd::Vec scales[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      scales[v] = load_as(stretch.scales, how_.scale_type, column + v * Simd::kLanes, lanes_of(v));
    }
    const std::byte* words = stretch.words + column * kWordBytes;
    const std::int64_t row_bytes = width_ * kWordBytes;
    const std::int64_t pair_bytes = stretch.columns * Made::kPairBytes;
    constexpr std::int64_t kColumnBytes = Made::Weights::kColumnBytes;
    std::byte* out = stretch.out + column * kColumnBytes;
    for (std::int64_t word = 0; word < stretch.count; ++word) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const auto packed = Simd::load_words(words + v * Simd::kLanes * kWordBytes, lanes_of(v));
        std::byte* to = out + v * Simd::kLanes * kColumnBytes;
        for_each_index<kWordPairs>([&](auto unit) __attribute__((always_inline)) {
          Made::template put<kValue>(coded_pair<unit()>(packed, table, scales[v]), to + unit() * pair_bytes,
                                     pair_bytes / 2, lanes_of(v));
        });
      }
      ADAPTRT_UNROLL
      for (int line = 0; line < kLines; ++line) {
        __builtin_prefetch(words + kStreamAhead + line * kCacheLine, 0, 3);
      }
      words += row_bytes;
      out += kWordPairs * pair_bytes;
    }
  }

  Quantization how_;
  QuantizedPanel parts_;
  std::int64_t width_;
  std::int64_t scale_bytes_;
  Simd::Table table_;
};

template <class Made>
void expand_coded(const std::byte* panel, const Quantization& how, std::int64_t k, std::int64_t width,
                  std::byte* out) {
  CodeExpander<Made>(panel, how, k, width).expand(0, k, out, width);
}

/// As gemm_streamed: all tiles of rows take a part of k, which was made for them, before the next is made.
template <class Made>
void coded_gemm(const PanelGemm& gemm, const Quantization& how) {
  using Weights = typename Made::Weights;
  using A = typename Weights::A;
  constexpr std::int64_t kPartInputs = kStreamSteps * Weights::kInterleave;
  alignas(kCacheLine) std::byte made[kStreamSteps * kPanelColumns * Weights::kColumnBytes];
  const CodeExpander<Made> expander(gemm.panel, how, gemm.k, kPanelColumns);
  const std::int64_t tiles = (gemm.rows + kTileRows - 1) / kTileRows;
  SpanFetcher others(gemm.fetch);
  const std::int64_t parts = (gemm.k + kPartInputs - 1) / kPartInputs;
  const std::int64_t others_a_tile = (others.lines() + parts * tiles - 1) / (parts * tiles);
  PanelGemm part = gemm;
  part.panel = made;
  for (std::int64_t begin = 0; begin < gemm.k; begin += kPartInputs) {
    const std::int64_t end = std::min(begin + kPartInputs, gemm.k);
    expander.expand(begin, end, made, kPanelColumns);
    part.a = static_cast<const A*>(gemm.a) + begin;
    part.k = end - begin;
    std::int64_t row = 0;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t rows = rows_of_tile(gemm.rows - row, tiles - tile);
      const TileFunction multiply =
          begin > 0 ? streamed_tile_of<Weights, true>(rows, 0) : streamed_tile_of<Weights, false>(rows, 0);
      others.fetch(others_a_tile);
      multiply(part, row, 0, Simd::kLanes, {});
      row += rows;
    }
  }
}

using CodedGemm = void (*)(const PanelGemm& gemm, const Quantization& how);

/// Rows that coded_gemm takes.
template <class Made>
constexpr std::int64_t coded_rows_of() {
  return kCanStream<typename Made::Weights> ? kStreamRows : 0;
}

/// nullptr where panels are not streamed.
template <class Made>
constexpr CodedGemm coded_gemm_of() {
  if constexpr (kCanStream<typename Made::Weights>) return &coded_gemm<Made>;
  return nullptr;
}

}  // namespace
}  // namespace adaptrt
