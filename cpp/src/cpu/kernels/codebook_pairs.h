#pragma once

// Expands words with a codebook to weights, a line of a bfloat16 panel at once. Included by codebook_gemm.h
// for CPUs with products of bfloat16 pairs.

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "codebook_words.h"
#include "elementwise.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Makes pairs of bfloat16 for a group of inputs and kTileVectors vectors of outputs, one vector at a time.
template <class Words>
class CodebookPairs {
 public:
  static constexpr std::int64_t kBytes = Words::kBytes;
  static constexpr int kPairs = Words::kPairs;
  using Row = typename Words::Row;

  explicit CodebookPairs(const Words& words) : words_(words) {}

  /// Sets the scales of the outputs from `column` on.
  void set_scales(const std::byte* scales, DType type, std::int64_t column) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kTileVectors; ++v) {
      scales_[v] = Simd::twice_each(
          Words::scales_of(load_as(scales, type, column + v * Simd::kLanes, std::int64_t{Simd::kLanes})));
    }
  }
  static Row load(const std::byte* from) { return Words::load_row(from); }
  /// Weights of pair kPair of a row and of vector v of the outputs.
  template <int kPair>
  [[nodiscard]] Simd::Words pairs(const Row& row, int v) const {
    const Simd::TwoVecs numbers = words_.template row<kPair>(row);
    return Simd::round_to_pairs(
        {Words::product(numbers.low, scales_[v].low), Words::product(numbers.high, scales_[v].high)});
  }

 private:
  Words words_;
  Simd::TwoVecs scales_[kTileVectors];
};

/// The same for scales that are powers of two, whose exponents are added to those of the numbers. bfloat16
/// must represent all numbers exactly, and they must be zero or from 1/2 to 8.
class ScaledByPowers {
 public:
  static constexpr std::int64_t kBytes = TableWords::kBytes;
  static constexpr int kPairs = TableWords::kPairs;
  using Row = Simd::Words;

  explicit ScaledByPowers(WeightCode code) : table_(Simd::load_pair_table(code_table(code).data())) {}

  /// Returns true if all scales are powers of two such that no product is infinite or subnormal. Otherwise
  /// this class cannot make the weights.
  bool set_scales(const std::byte* scales, DType type) {
    bool are_powers = true;
    ADAPTRT_UNROLL
    for (int v = 0; v < kTileVectors; ++v) {
      const Simd::Vec some = load_as(scales, type, v * Simd::kLanes, std::int64_t{Simd::kLanes});
      are_powers &= Simd::are_powers_of_two(some, kLeastPower, kGreatestPower);
      powers_[v] = Simd::exponent_pairs(some);
    }
    return are_powers;
  }
  static Row load(const std::byte* from) { return Simd::load_words(from, Simd::kLanes); }
  template <int kPair>
  [[nodiscard]] Simd::Words pairs(const Row& row, int v) const {
    return Simd::add_to_exponents(Simd::look_up_pairs<4 * kPair>(row, table_), powers_[v]);
  }

 private:
  static constexpr int kLeastPower = -125;
  static constexpr int kGreatestPower = 124;

  Simd::Words table_;
  Simd::Words powers_[kTileVectors];
};

}  // namespace
}  // namespace adaptrt
