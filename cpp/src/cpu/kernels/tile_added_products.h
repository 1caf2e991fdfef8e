#pragma once

// Many small products of few rows of bfloat16 that are added to their outputs, with the bits of tile_gemm.
// Included after tile_few_rows.h and tile_compressed_matrix.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "compressed_matrix_gemm.h"
#include "tile_compressed_matrix.h"
#include "tile_few_rows.h"

namespace adaptrt {
namespace {

/// The pairs of two inputs' weights of a full panel, one after the other.
class PlainPairs {
 public:
  explicit PlainPairs(const std::byte* panel) : next_(panel) {}

  template <class Words, int kVectors>
  __attribute__((always_inline)) void take(Words (&words)[kVectors]) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      words[v] = Simd::load_words(next_ + v * Simd::kLanes * 4, Simd::kLanes);
    }
    next_ += kPanelColumns * 4;
  }

 private:
  const std::byte* next_;
};

struct NothingAhead {
  void at_piece() {}
};

/// The same, of a compressed panel whose pieces have vectors of this instruction set.
class CompressedPairs {
 public:
  explicit CompressedPairs(const MatrixPanel& panel) : reader_(panel, NothingAhead()) {}

  template <class Words>
  __attribute__((always_inline)) void take(Words (&words)[4]) {
    reader_.expand(words);
  }

 private:
  PieceReader<NothingAhead> reader_;
};

/// The same, of a compressed panel without outliers, like most panels of adapters.
class PiecePairs {
 public:
  explicit PiecePairs(const MatrixPanel& panel)
      : expander_(CompressedPanel{.table = panel.table}), piece_(panel.pieces) {}

  template <class Words>
  __attribute__((always_inline)) void take(Words (&words)[4]) {
    expander_.expand(piece_, words);
    piece_ += kCompressedPieceBytes;
  }

 private:
  PieceExpander expander_;
  const std::byte* piece_;
};

/// Adds the product of kRows rows from `row` on. The order of sums is that of multiply_few_columns.
template <int kRows, class Pairs>
void add_product(const AddedProduct& product, std::int64_t row, Pairs pairs) {
  constexpr int kVectors = static_cast<int>(kPanelColumns / Simd::kLanes);
  const std::byte* a = product.a + row * product.a_stride;
  float* out = product.out + row * kPanelColumns;
  for (std::int64_t begin = 0; begin < product.k; begin += kStepInputs) {
    Simd::Vec even[kRows][kVectors];
    Simd::Vec odd[kRows][kVectors];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = Simd::zero();
    }
    const auto add_pair = [&](std::int64_t input, auto count) __attribute__((always_inline)) {
      Simd::Words words[kVectors];
      pairs.take(words);
      Simd::Pair columns[kVectors];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) columns[v] = Simd::bfloat16_pairs(words[v]);
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, a + r * product.a_stride + input * 2, 2 * count());
        const Simd::Pair values = Simd::bfloat16_pairs(Simd::set_words(bits));
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          even[r][v] = Simd::fma(values.even, columns[v].even, even[r][v]);
          odd[r][v] = Simd::fma(values.odd, columns[v].odd, odd[r][v]);
        }
      }
    };
    const std::int64_t end = std::min(begin + kStepInputs, product.k);
    std::int64_t input = begin;
    for (; input + 2 <= end; input += 2) add_pair(input, std::integral_constant<std::size_t, 2>());
    if (input < end) add_pair(input, std::integral_constant<std::size_t, 1>());
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* at = out + r * kPanelColumns + v * Simd::kLanes;
        Simd::store(at, Simd::add(Simd::load(at), Simd::add(even[r][v], odd[r][v])));
      }
    }
  }
}

template <class Pairs>
void add_product(const AddedProduct& product, Pairs pairs) {
  std::int64_t row = 0;
  for (; row + kFewRows <= product.rows; row += kFewRows) add_product<kFewRows>(product, row, pairs);
  if (product.rows - row == 1) add_product<1>(product, row, pairs);
  if (product.rows - row == 2) add_product<2>(product, row, pairs);
}

/// See KernelTable::add_products. kPiecesAreVectors: a vector of a piece is one of this instruction set.
template <bool kPiecesAreVectors>
void tile_add_products(std::span<const AddedProduct> products) {
  const FlushSubnormals flush;
  for (const AddedProduct& product : products) {
    if (product.compressed == nullptr) {
      add_product(product, PlainPairs(product.panel));
      continue;
    }
    if constexpr (kPiecesAreVectors) {
      if (product.k % 2 == 0) {
        if (product.compressed->count == 0) {
          add_product(product, PiecePairs(*product.compressed));
        } else {
          add_product(product, CompressedPairs(*product.compressed));
        }
        continue;
      }
    }
    for (std::int64_t row = 0; row < product.rows; row += kFewRows) {
      const GemmCall call{.a = product.a + row * product.a_stride,
                          .a_stride = product.a_stride / 2,
                          .k = product.k,
                          .width = kPanelColumns,
                          .out = product.out + row * kPanelColumns,
                          .out_stride = kPanelColumns,
                          .rows = std::min(kFewRows, product.rows - row)};
      tile_matrix_panel_gemm<kPiecesAreVectors>({.call = call, .accumulate = true}, *product.compressed);
    }
  }
}

}  // namespace
}  // namespace adaptrt
