#pragma once

// Words of panels with a codebook. Included after simd_*.h and gemm.h.

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "gemm.h"

namespace adaptrt {
namespace {

// pair() turns a word into pairs of numbers; product() multiplies them by the result of scales_of(). For CPUs
// with products of bfloat16 pairs, row() makes the numbers of a whole vector of words in the order of a
// panel: the two inputs of an output are neighbours, and outputs follow one another.

/// True for codes whose words are TableWords.
inline bool is_table(WeightCode code) {
  return code != WeightCode::kE4M3 && code != WeightCode::kLLMInt8;
}

class TableWords {
 public:
  using Word = Simd::Words;
  static constexpr std::int64_t kBytes = 4;
  static constexpr int kPairs = static_cast<int>(kInt4Inputs / 2);

  explicit TableWords(WeightCode code) : table_(Simd::load_table(code_table(code).data())) {}
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_words(from, n); }
  static Simd::Vec scales_of(Simd::Vec scales) { return scales; }
  static Simd::Vec product(Simd::Vec numbers, Simd::Vec scales) { return Simd::mul(numbers, scales); }
  template <int kPair>
  [[nodiscard]] Simd::Pair pair(Word word) const {
    return {Simd::look_up<4 * kPair>(word, table_), Simd::look_up<4 * kPair + 16>(word, table_)};
  }
#ifdef __AVX512BF16__
  /// Maximum number of rows of a tile whose sums fit in the registers that expanding weights leaves free.
  static constexpr int kMostRows = 3;
  struct Row {
    Simd::Words low;
    Simd::Words high;
  };
  /// The halves of a word hold its even and its odd inputs.
  static Row load_row(const std::byte* from) {
    return {Simd::load_uint16(from), Simd::load_uint16(from + 2 * Simd::kLanes)};
  }
  template <int kPair>
  [[nodiscard]] Simd::TwoVecs row(const Row& row) const {
    return {Simd::look_up<4 * kPair>(row.low, table_), Simd::look_up<4 * kPair>(row.high, table_)};
  }
#endif

 private:
  Simd::Table table_;
};

/// Words with one byte per input. Loading them makes the numbers.
struct CodebookByteWords {
  using Word = Simd::Pair;
  static constexpr std::int64_t kBytes = 2;
  static constexpr int kPairs = 1;

  explicit CodebookByteWords(WeightCode) {}
  template <int kPair>
  [[nodiscard]] Simd::Pair pair(const Word& word) const {
    return word;
  }
#ifdef __AVX512BF16__
  static constexpr int kMostRows = kTileRows;
  using Row = Simd::TwoVecs;
  template <int kPair>
  [[nodiscard]] Simd::TwoVecs row(const Row& row) const {
    return row;
  }
#endif
};

struct Float8Words : CodebookByteWords {
  using CodebookByteWords::CodebookByteWords;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_float8_pairs(from, n); }
  /// The loaded numbers are divided by 256, so scales are multiplied by 256; the products are the same.
  static Simd::Vec scales_of(Simd::Vec scales) { return Simd::mul(scales, Simd::set(256.0F)); }
  static Simd::Vec product(Simd::Vec numbers, Simd::Vec scales) { return Simd::mul(numbers, scales); }
#ifdef __AVX512BF16__
  static Row load_row(const std::byte* from) { return Simd::load_float8(from); }
#endif
};

struct LLMInt8Words : CodebookByteWords {
  using CodebookByteWords::CodebookByteWords;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_int8_pairs(from, n); }
  static Simd::Vec scales_of(Simd::Vec scales) { return scales; }
  static Simd::Vec product(Simd::Vec numbers, Simd::Vec scales) {
    return Simd::mul(Simd::mul(numbers, scales), Simd::set(kLLMInt8Factor));
  }
#ifdef __AVX512BF16__
  static Row load_row(const std::byte* from) {
    return {Simd::load_int8(from), Simd::load_int8(from + Simd::kLanes)};
  }
#endif
};

}  // namespace
}  // namespace adaptrt
