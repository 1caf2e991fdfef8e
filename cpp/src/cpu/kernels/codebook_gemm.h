#pragma once

// Panels with a codebook: a table of numbers with four-bit indices, FP8, or LLM.int8(). Each weight is
// expanded to the number of the engine's type that it represents, and is multiplied like a stored one, with
// the same bits. Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "codebook_words.h"
#include "elementwise.h"
#include "gemm.h"
#include "quantized_weights.h"
#ifdef __AVX512BF16__
#include "codebook_pairs.h"
#include "codebook_tile.h"
#endif

namespace adaptrt {
namespace {

/// Type of the expanded panels. put() writes two inputs of some outputs. If an input has a line of its own,
/// the second one begins at out + line.
struct CodebookBFloat16 {
  using Weights = BFloat16Weights;
  static constexpr DType kType = DType::kBFloat16;
  /// Bytes of two inputs of an output.
  static constexpr std::int64_t kPairBytes = 4;
  template <DType>
  static void put(Simd::Pair pair, std::byte* out, std::int64_t, std::int64_t lanes) {
    Simd::store_words(out, Simd::round_to_pairs(pair.even, pair.odd), lanes);
  }
};

struct CodebookFloat16 {
  using Weights = Float16Weights;
  static constexpr DType kType = DType::kFloat16;
  static constexpr std::int64_t kPairBytes = 4;
  template <DType>
  static void put(Simd::Pair pair, std::byte* out, std::int64_t line, std::int64_t lanes) {
    Simd::store_float16(out, pair.even, lanes);
    Simd::store_float16(out + line, pair.odd, lanes);
  }
};

struct CodebookFloat32 {
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

/// Expands a panel with a codebook to a panel of the engine's type, some inputs at a time.
template <class Made>
class CodebookExpander {
 public:
  CodebookExpander(const std::byte* panel, const Quantization& how, std::int64_t k, std::int64_t width)
      : how_(how),
        parts_(parts_of_panel(how, panel, k, width)),
        width_(width),
        group_size_(how.group_size == 0 ? k : how.group_size),
        scale_bytes_(static_cast<std::int64_t>(size_of(how.scale_type))) {}

  /// Address of the words of an input, which must be the first of a word.
  [[nodiscard]] const std::byte* source(std::int64_t input) const {
    const bool has_table = is_table(how_.code);
    const std::int64_t line = width_ * (has_table ? TableWords::kBytes : CodebookByteWords::kBytes);
    return parts_.weights +
           input / (has_table ? 2 * TableWords::kPairs : 2 * CodebookByteWords::kPairs) * line;
  }

  /// Expands inputs [begin, end), in whole words, to `out`, with `columns` outputs for each input. `fetch` is
  /// called with the lines that are read.
  template <class Fetch = FetchAhead>
  void expand(std::int64_t begin, std::int64_t end, std::byte* out, std::int64_t columns,
              const Fetch& fetch = {}) const {
    if constexpr (Made::kType != DType::kFloat32) {
      expand_as<Made::kType>(begin, end, out, columns, fetch);
      return;
    }
    switch (how_.value_type) {
      case DType::kFloat32:
        expand_as<DType::kFloat32>(begin, end, out, columns, fetch);
        return;
      case DType::kFloat16:
        expand_as<DType::kFloat16>(begin, end, out, columns, fetch);
        return;
      case DType::kBFloat16:
        expand_as<DType::kBFloat16>(begin, end, out, columns, fetch);
        return;
    }
  }

 private:
  template <DType kValue, class Fetch>
  void expand_as(std::int64_t begin, std::int64_t end, std::byte* out, std::int64_t columns,
                 const Fetch& fetch) const {
    if (how_.code == WeightCode::kE4M3) {
      expand_words<kValue>(Float8Words(how_.code), begin, end, out, columns, fetch);
    } else if (how_.code == WeightCode::kLLMInt8) {
      expand_words<kValue>(LLMInt8Words(how_.code), begin, end, out, columns, fetch);
    } else {
      expand_words<kValue>(TableWords(how_.code), begin, end, out, columns, fetch);
    }
  }

  template <DType kValue, class Words, class Fetch>
  void expand_words(Words words, std::int64_t begin, std::int64_t end, std::byte* out, std::int64_t columns,
                    const Fetch& fetch) const {
    constexpr std::int64_t kWordInputs = 2 * Words::kPairs;
    constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
    for (std::int64_t first = begin; first < end;) {
      const std::int64_t group = first / group_size_;
      const std::int64_t last = std::min((group + 1) * group_size_, end);
      const Stretch stretch{parts_.weights + first / kWordInputs * width_ * Words::kBytes,
                            parts_.scales + group * width_ * scale_bytes_, (last - first) / kWordInputs,
                            out + (first - begin) / 2 * columns * Made::kPairBytes, columns};
      std::int64_t column = 0;
      for (; column + kGroup <= width_; column += kGroup) {
        if constexpr (Made::kType == DType::kBFloat16 && kMakesRows) {
          expand_rows(words, stretch, column, fetch);
        } else {
          expand_columns<kValue, kTileVectors>(words, stretch, column, Simd::kLanes, fetch);
        }
      }
      for (; column < width_; column += Simd::kLanes) {
        expand_columns<kValue, 1>(words, stretch, column,
                                  std::min<std::int64_t>(Simd::kLanes, width_ - column), fetch);
      }
      first = last;
    }
  }

  /// Consecutive inputs of one group.
  struct Stretch {
    const std::byte* words;
    const std::byte* scales;
    std::int64_t count;  ///< number of words per output
    std::byte* out;
    std::int64_t columns;
  };

  /// Expands kVectors vectors of columns; the last one has last_lanes columns.
  template <DType kValue, int kVectors, class Words, class Fetch>
  void expand_columns(Words how, const Stretch& stretch, std::int64_t column, std::int64_t last_lanes,
                      const Fetch& fetch) const {
    constexpr int kLines =
        static_cast<int>((kVectors * Simd::kLanes * Words::kBytes + kCacheLine - 1) / kCacheLine);
    const auto lanes_of = [&](int v) { return v == kVectors - 1 ? last_lanes : std::int64_t{Simd::kLanes}; };
    Simd::Vec scales[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      scales[v] =
          Words::scales_of(load_as(stretch.scales, how_.scale_type, column + v * Simd::kLanes, lanes_of(v)));
    }
    const std::byte* words = stretch.words + column * Words::kBytes;
    const std::int64_t row_bytes = width_ * Words::kBytes;
    const std::int64_t pair_bytes = stretch.columns * Made::kPairBytes;
    constexpr std::int64_t kColumnBytes = Made::Weights::kColumnBytes;
    std::byte* out = stretch.out + column * kColumnBytes;
    for (std::int64_t word = 0; word < stretch.count; ++word) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const auto packed = Words::load(words + v * Simd::kLanes * Words::kBytes, lanes_of(v));
        std::byte* to = out + v * Simd::kLanes * kColumnBytes;
        for_each_index<Words::kPairs>([&](auto unit) __attribute__((always_inline)) {
          const Simd::Pair numbers = how.template pair<unit()>(packed);
          const Simd::Pair values{Words::product(numbers.even, scales[v]),
                                  Words::product(numbers.odd, scales[v])};
          Made::template put<kValue>(values, to + unit() * pair_bytes, pair_bytes / 2, lanes_of(v));
        });
      }
      fetch.template at_lines<kLines>(words);
      words += row_bytes;
      out += Words::kPairs * pair_bytes;
    }
  }

#ifdef __AVX512BF16__
  static constexpr bool kMakesRows = true;

  /// The same for whole vectors of columns.
  template <class Words, class Fetch>
  void expand_rows(const Words& how, const Stretch& stretch, std::int64_t column, const Fetch& fetch) const {
    constexpr std::int64_t kMadeBytes = CodebookBFloat16::kPairBytes;
    CodebookPairs<Words> weights(how);
    weights.set_scales(stretch.scales, how_.scale_type, column);
    const std::byte* words = stretch.words + column * Words::kBytes;
    std::byte* out = stretch.out + column * kMadeBytes;
    for (std::int64_t word = 0; word < stretch.count; ++word) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kTileVectors; ++v) {
        const auto row = weights.load(words + v * Simd::kLanes * Words::kBytes);
        for_each_index<Words::kPairs>([&](auto pair) __attribute__((always_inline)) {
          std::byte* to = out + (pair() * stretch.columns + v * Simd::kLanes) * kMadeBytes;
          Simd::store_words(to, weights.template pairs<pair()>(row, v), Simd::kLanes);
        });
      }
      fetch.template at_lines<static_cast<int>(kTileVectors * Simd::kLanes * Words::kBytes / kCacheLine)>(
          words);
      words += width_ * Words::kBytes;
      out += Words::kPairs * stretch.columns * kMadeBytes;
    }
  }
#else
  static constexpr bool kMakesRows = false;
#endif

  Quantization how_;
  QuantizedPanel parts_;
  std::int64_t width_;
  std::int64_t group_size_;
  std::int64_t scale_bytes_;
};

template <class Made>
void expand_codebook(const std::byte* panel, const Quantization& how, std::int64_t k, std::int64_t width,
                     std::byte* out) {
  CodebookExpander<Made>(panel, how, k, width).expand(0, k, out, width);
}

/// Like gemm_streamed: a part of k is expanded, and all tiles of rows are multiplied by it before the next
/// part.
template <class Made>
void codebook_gemm(const PanelGemm& gemm, const Quantization& how) {
#ifdef __AVX512BF16__
  if constexpr (Made::kType == DType::kBFloat16) {
    if (takes_codebook_tile(gemm.call.rows, how.code)) {
      multiply_codebook_tile(gemm, how);
      return;
    }
  }
#endif
  using Weights = typename Made::Weights;
  using A = typename Weights::A;
  constexpr std::int64_t kPartInputs = kStreamSteps * Weights::kInterleave;
  alignas(kCacheLine) std::byte made[kStreamSteps * kPanelColumns * Weights::kColumnBytes];
  const CodebookExpander<Made> expander(gemm.call.panel, how, gemm.call.k, kPanelColumns);
  const std::int64_t tiles = (gemm.call.rows + kTileRows - 1) / kTileRows;
  SpanFetcher others(gemm.fetch);
  const std::int64_t parts = (gemm.call.k + kPartInputs - 1) / kPartInputs;
  const std::int64_t others_a_tile = (others.lines() + parts * tiles - 1) / (parts * tiles);
  PanelGemm part = gemm;
  part.call.panel = made;
  for (std::int64_t begin = 0; begin < gemm.call.k; begin += kPartInputs) {
    const std::int64_t end = std::min(begin + kPartInputs, gemm.call.k);
    expander.expand(begin, end, made, kPanelColumns);
    part.call.a = static_cast<const A*>(gemm.call.a) + begin;
    part.call.k = end - begin;
    std::int64_t row = 0;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, tiles - tile);
      others.fetch(others_a_tile);
      streamed_tile_of<Weights>(rows, 0)(part, row, 0, Simd::kLanes, begin > 0, {});
      row += rows;
    }
  }
}

using CodebookGemm = void (*)(const PanelGemm& gemm, const Quantization& how);

/// Maximum number of rows for codebook_gemm.
template <class Made>
constexpr std::int64_t codebook_rows_of() {
  return kCanStream<typename Made::Weights> ? kStreamRows : 0;
}

/// nullptr if panels are not streamed.
template <class Made>
constexpr CodebookGemm codebook_gemm_of() {
  if constexpr (kCanStream<typename Made::Weights>) return &codebook_gemm<Made>;
  return nullptr;
}

}  // namespace
}  // namespace adaptrt
