#pragma once

// Products of few rows of bfloat16 with panels of compressed matrices (core/compressed_matrix.h), with the
// bits of tile_gemm. Included after tile_few_rows.h, tile_gemm.h and compressed_matrix_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/cpu/kernel_table.h"
#include "compressed_matrix_gemm.h"
#include "tile_few_rows.h"
#include "tile_gemm.h"

namespace adaptrt {
namespace {

/// Prefetches pieces as tile_gemm prefetches the lines of a panel.
struct PieceStream {
  void at_piece() { prefetch.at_lines<kPieceLines>(); }
  StepPrefetch prefetch;
};

/// sums [kRows, kVectors vectors] = a * the next pieces of a panel of that width, or += if the sums continue.
/// Pieces are expanded in registers. The order of sums is that of multiply_few_columns.
template <int kRows, int kVectors, class Reader>
void multiply_few_of_matrix(Reader* reader, const FewInputs& a, std::int64_t inputs, TileSums sums) {
  // The fewest pieces that have whole pairs of inputs.
  constexpr int kPieces = std::lcm(kVectors, 4) / 4;
  constexpr int kPairs = 4 * kPieces / kVectors;
  static_assert(kStepInputs % (2 * kPairs) == 0);
  for (std::int64_t begin = 0; begin < inputs; begin += kStepInputs) {
    Simd::Vec even[kRows][kVectors];
    Simd::Vec odd[kRows][kVectors];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = Simd::zero();
    }
    Simd::Words words[kPieces][4];
    const auto multiply = [&](int pair, std::int64_t input) __attribute__((always_inline)) {
      Simd::Pair columns[kVectors];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const int vector = pair * kVectors + v;
        columns[v] = Simd::bfloat16_pairs(words[vector / 4][vector % 4]);
      }
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Simd::Vec first = Simd::set(a.row(r)[input]);
        const Simd::Vec second = Simd::set(a.row(r)[input + 1]);
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          even[r][v] = Simd::fma(first, columns[v].even, even[r][v]);
          odd[r][v] = Simd::fma(second, columns[v].odd, odd[r][v]);
        }
      }
    };
    const std::int64_t end = std::min(begin + kStepInputs, inputs);
    std::int64_t input = begin;
    for (; input + 2 * kPairs <= end; input += 2 * kPairs) {
      ADAPTRT_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) reader->expand(words[piece]);
      ADAPTRT_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) multiply(pair, input + 2 * pair);
    }
    if constexpr (kPairs > 1) {
      if (input < end) {
        const std::int64_t vectors_left = (end - input) / 2 * kVectors;
        ADAPTRT_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) {
          if (4 * piece < vectors_left) reader->expand(words[piece]);
        }
        ADAPTRT_UNROLL
        for (int pair = 0; pair < kPairs - 1; ++pair) {
          if (input + 2 * pair < end) multiply(pair, input + 2 * pair);
        }
      }
    }
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* at = sums.data + r * sums.stride + v * Simd::kLanes;
        const Simd::Vec before = sums.continues || begin > 0 ? Simd::load(at) : Simd::zero();
        Simd::store(at, Simd::add(before, Simd::add(even[r][v], odd[r][v])));
      }
    }
  }
}

/// Inputs of a part of a panel of any width that is expanded to the first-level cache. They fill as many
/// whole pieces as the panel has outputs.
inline constexpr std::int64_t kMatrixPartInputs = kPieceElements;

/// sums [rows, width] = at most kFewRows rows * a panel, or += if the sums continue. Expands parts of the
/// panel.
template <class Reader>
void multiply_parts_of_matrix(Reader* reader, FewRows rows, std::int64_t inputs, std::int64_t width,
                              TileSums sums) {
  alignas(kCacheLine) std::byte expanded[kPanelColumns * kPiecePanelBytes];
  const std::int64_t line = width * BFloat16Pairs::kColumnBytes;
  for (std::int64_t begin = 0; begin < inputs; begin += kMatrixPartInputs) {
    const std::int64_t count = std::min(kMatrixPartInputs, inputs - begin);
    const std::int64_t bytes = (count + 1) / 2 * line;
    for (std::int64_t at = 0; at < bytes; at += kPiecePanelBytes) reader->expand(expanded + at);
    StepPrefetch nothing;
    multiply_few(BFloat16Pairs(), rows.from(begin), {expanded, line, count}, width, sums, &nothing);
    sums.continues = true;
  }
}

/// See KernelTable::matrix_panel_gemm. kPiecesAreVectors: a vector of a piece is one of this instruction set.
template <bool kPiecesAreVectors>
bool tile_matrix_panel_gemm(const PanelGemm& gemm, const MatrixPanel& panel) {
  if (gemm.call.rows > kFewRows) return false;
  const FewRows rows = few_rows_of(activations_of(gemm), 0, gemm.call.rows);
  const TileSums sums{gemm.call.out, gemm.call.out_stride, gemm.accumulate};
  PieceReader reader(panel,
                     PieceStream{prefetch_of(gemm, panel.pieces, panel.num_pieces * kCompressedPieceBytes,
                                             gemm.call.next_panel, 0)});
  const std::int64_t width = gemm.call.width;
  const auto in_registers = [&](auto vectors) {
    for_few_inputs(rows, gemm.call.k, sums,
                   [&](auto num_rows, const FewInputs& a, std::int64_t, std::int64_t count, TileSums to) {
                     multiply_few_of_matrix<num_rows(), vectors()>(&reader, a, count, to);
                   });
    return true;
  };
  if constexpr (kPiecesAreVectors) {
    if (gemm.call.k % 2 == 0) {
      if (width == Simd::kLanes) return in_registers(std::integral_constant<int, 1>());
      if (width == 2 * Simd::kLanes) return in_registers(std::integral_constant<int, 2>());
      if (width == 3 * Simd::kLanes) return in_registers(std::integral_constant<int, 3>());
      if (width == 4 * Simd::kLanes) return in_registers(std::integral_constant<int, 4>());
    }
  }
  multiply_parts_of_matrix(&reader, rows, gemm.call.k, width, sums);
  return true;
}

}  // namespace
}  // namespace adaptrt
