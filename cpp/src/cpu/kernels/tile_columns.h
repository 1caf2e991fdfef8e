#pragma once

// Products of few rows of bfloat16 with columns of a matrix, with the bits of tile registers. Included after
// tile_few_rows.h and column_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "column_gemm.h"
#include "tile_few_rows.h"

namespace adaptrt {
namespace {

/// The live inputs of a step: even ones, then odd ones.
template <int kRows>
struct StepColumns {
  struct Half {
    std::int64_t count = 0;
    /// Address of each input's column, at the first needed output.
    const std::byte* columns[kStepInputs / 2];
    float values[kStepInputs / 2][kRows];
  };
  Half halves[2];

  /// Takes live inputs from number *next on, and advances *next.
  StepColumns(const ColumnGemm& gemm, std::int64_t* next) {
    const LiveColumns& live = gemm.live;
    const auto* a = static_cast<const std::uint16_t*>(gemm.a);
    const std::int64_t end = (live.inputs[*next] / kStepInputs + 1) * kStepInputs;
    for (; *next < live.count && live.inputs[*next] < end; ++*next) {
      const std::int64_t input = live.inputs[*next];
      Half& half = halves[input % 2];
      half.columns[half.count] = live.columns[*next] + gemm.first * 2;
      for (int r = 0; r < kRows; ++r) {
        half.values[half.count][r] = bfloat16_to_float(a[r * gemm.a_stride + input]);
      }
      ++half.count;
    }
  }
};

/// Computes the sums of one half of a step, for kWords vectors of words. For each vector, `even` are the
/// outputs in the lower halves of the words, and `odd` those in the upper halves.
template <int kRows, int kWords>
void sum_half(const typename StepColumns<kRows>::Half& half, std::int64_t column,
              Simd::Pair (&sums)[kRows][kWords]) {
  constexpr std::int64_t kWordBytes = Simd::kLanes * 4;
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kWords; ++v) sums[r][v] = {Simd::zero(), Simd::zero()};
  }
  for (std::int64_t i = 0; i < half.count; ++i) {
    const std::byte* from = half.columns[i] + column * 2;
    Simd::Pair weights[kWords];
    ADAPTRT_UNROLL
    for (int v = 0; v < kWords; ++v) {
      weights[v] = Simd::bfloat16_pairs(Simd::load_words(from + v * kWordBytes, std::int64_t{Simd::kLanes}));
    }
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Simd::Vec value = Simd::set(half.values[i][r]);
      ADAPTRT_UNROLL
      for (int v = 0; v < kWords; ++v) {
        sums[r][v].even = Simd::fma(value, weights[v].even, sums[r][v].even);
        sums[r][v].odd = Simd::fma(value, weights[v].odd, sums[r][v].odd);
      }
    }
  }
}

/// Adds a step's sums to the outputs from `column` on; the sums are those of sparse_few_columns. Until all
/// steps are added, outputs have the order of sum_half.
template <int kRows, int kWords>
void add_step(const ColumnGemm& gemm, const StepColumns<kRows>& step, std::int64_t column) {
  Simd::Pair even[kRows][kWords];
  Simd::Pair odd[kRows][kWords];
  sum_half<kRows, kWords>(step.halves[0], column, even);
  sum_half<kRows, kWords>(step.halves[1], column, odd);
  float* to = sums_of_column(gemm, column);
  const auto add = [](float* sum, Simd::Vec x, Simd::Vec y) __attribute__((always_inline)) {
    Simd::store(sum, Simd::add(Simd::load(sum), Simd::add(x, y)));
  };
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r, to += kPanelColumns) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kWords; ++v) {
      add(to + 2 * v * Simd::kLanes, even[r][v].even, odd[r][v].even);
      add(to + (2 * v + 1) * Simd::kLanes, even[r][v].odd, odd[r][v].odd);
    }
  }
}

/// Reorders outputs from the order of sum_half to ascending order.
inline void interleave_outputs(float* out, std::int64_t count) {
  for (std::int64_t begin = 0; begin < count; begin += 2 * Simd::kLanes) {
    float halves[2 * Simd::kLanes];
    std::copy_n(out + begin, 2 * Simd::kLanes, halves);
    for (int i = 0; i < Simd::kLanes; ++i) {
      out[begin + 2 * i] = halves[i];
      out[begin + 2 * i + 1] = halves[Simd::kLanes + i];
    }
  }
}

/// Adds a step to all outputs before the next step.
template <int kRows>
void tile_columns_of_rows(const ColumnGemm& gemm) {
  constexpr int kWords = kRows == 1 ? static_cast<int>(kPanelColumns / Simd::kLanes / 2) : kTileVectors / 2;
  constexpr std::int64_t kGroup = 2 * kWords * Simd::kLanes;
  std::fill_n(gemm.out, kRows * gemm.width, 0.0F);
  ColumnFetcher fetcher(gemm, 2);
  for (std::int64_t next = 0; next < gemm.live.count;) {
    const std::int64_t before = next;
    const StepColumns<kRows> step(gemm, &next);
    const std::int64_t bytes = (next - before) * kGroup * 2;
    std::int64_t column = 0;
    if constexpr (kRows == 1) {  // the panels of one row are consecutive
      for (; column + 2 * kGroup <= gemm.width; column += 2 * kGroup) {
        add_step<kRows, 2 * kWords>(gemm, step, column);
        fetcher.fetch(2 * bytes);
      }
    }
    for (; column < gemm.width; column += kGroup) {
      add_step<kRows, kWords>(gemm, step, column);
      fetcher.fetch(bytes);
    }
  }
  interleave_outputs(gemm.out, kRows * gemm.width);
}

void tile_column_gemm(const ColumnGemm& gemm) {
  const FlushSubnormals flush;
  if (gemm.rows == 1) return tile_columns_of_rows<1>(gemm);
  if (gemm.rows == 2) return tile_columns_of_rows<2>(gemm);
  tile_columns_of_rows<static_cast<int>(kFewRows)>(gemm);
}

}  // namespace
}  // namespace adaptrt
