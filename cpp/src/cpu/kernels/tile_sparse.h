#pragma once

// Products of few rows of bfloat16 that read a part of a matrix, with the bits of tile registers. Included
// after tile_few_rows.h, tile_gemm.h and sparse_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sparse_gemm.h"
#include "tile_few_rows.h"
#include "tile_gemm.h"

namespace adaptrt {
namespace {

/// Gathers some steps of the outputs at a time, and multiplies them from the first-level cache.
void tile_gathered_gemm(const PanelGemm& gemm, const GatheredOutputs& gathered) {
  constexpr std::int64_t kPartInputs = kFewRowsSteps * kStepInputs;
  static_assert(kStepLine == kGatheredLine);
  alignas(kCacheLine) std::byte made[kFewRowsSteps * kStepBytes];
  if (has_empty_columns(gathered)) std::memset(made, 0, sizeof(made));
  const std::int64_t columns = (gathered.count + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes;
  const std::int64_t words = gemm.call.k / 2;
  fetch_first_words(gathered, words);
  SpanFetcher others(gemm.fetch);
  others.fetch(others.lines());
  const StepActivations a = activations_of(gemm);
  StepPrefetch nothing;
  for (std::int64_t begin = 0; begin < gemm.call.k; begin += kPartInputs) {
    const std::int64_t end = std::min(begin + kPartInputs, gemm.call.k);
    gather_words(gathered, words, begin / 2, end / 2, made);
    multiply_few(BFloat16Pairs(), {a.rows + begin * 2, a.stride, gemm.call.rows},
                 {made, kStepLine, end - begin}, columns, {gemm.call.out, gemm.call.out_stride, begin > 0},
                 &nothing);
  }
}

/// Multiplies the live pairs of inputs by kVectors vectors of columns, in the order of multiply_few_columns.
template <int kRows, int kVectors>
void sparse_few_columns(const PanelGemm& gemm, const LiveInputs& live, std::int64_t column,
                        LiveFetcher fetcher) {
  constexpr std::int64_t kVectorBytes = Simd::kLanes * kGatheredWord;
  constexpr int kLines = static_cast<int>((kVectors * kVectorBytes + kCacheLine - 1) / kCacheLine);
  const auto* a = static_cast<const std::uint16_t*>(gemm.call.a);
  const std::byte* b = gemm.call.panel + column * kGatheredWord;
  Simd::Vec sums[kRows][kVectors];
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::zero();
  }
  for (std::int64_t i = 0; i < live.count;) {
    const std::int64_t step_end = (live.groups[i] / kTileHeight + 1) * kTileHeight;
    Simd::Vec even[kRows][kVectors];
    Simd::Vec odd[kRows][kVectors];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = Simd::zero();
    }
    for (; i < live.count && live.groups[i] < step_end; ++i) {
      const std::int64_t group = live.groups[i];
      fetcher.fetch<kLines>(i);
      Simd::Pair columns[kVectors];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = Simd::bfloat16_pairs(
            Simd::load_words(b + group * kStepLine + v * kVectorBytes, std::int64_t{Simd::kLanes}));
      }
      const bool has_odd = 2 * group + 1 < gemm.call.k;
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const std::uint16_t* pair = a + r * gemm.call.a_stride + 2 * group;
        const Simd::Vec first = Simd::set(bfloat16_to_float(pair[0]));
        const Simd::Vec second = Simd::set(has_odd ? bfloat16_to_float(pair[1]) : 0.0F);
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          even[r][v] = Simd::fma(first, columns[v].even, even[r][v]);
          odd[r][v] = Simd::fma(second, columns[v].odd, odd[r][v]);
        }
      }
    }
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Simd::add(sums[r][v], Simd::add(even[r][v], odd[r][v]));
      }
    }
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Simd::store(gemm.call.out + r * gemm.call.out_stride + column + v * Simd::kLanes, sums[r][v]);
    }
  }
}

/// Multiplies all columns at once if their sums fit in registers: neighbouring lines are then read together.
template <int kRows>
void tile_sparse_rows(const PanelGemm& gemm, const LiveInputs& live) {
  constexpr int kVectors = kRows == 1 ? static_cast<int>(kPanelColumns / Simd::kLanes) : kTileVectors;
  constexpr std::int64_t kGroup = kVectors * Simd::kLanes;
  for (std::int64_t column = 0; column < kPanelColumns; column += kGroup) {
    const std::byte* here = gemm.call.panel + column * kGatheredWord;
    const std::byte* next =
        column + kGroup == kPanelColumns ? gemm.call.next_panel : here + kGroup * kGatheredWord;
    sparse_few_columns<kRows, kVectors>(gemm, live, column, {here, next, live, kStepLine});
  }
}

void tile_sparse_gemm(const PanelGemm& gemm, const LiveInputs& live) {
  const FlushSubnormals flush;
  SpanFetcher others(gemm.fetch);
  others.fetch(others.lines());
  if (gemm.call.rows == 1) return tile_sparse_rows<1>(gemm, live);
  if (gemm.call.rows == 2) return tile_sparse_rows<2>(gemm, live);
  tile_sparse_rows<static_cast<int>(kFewRows)>(gemm, live);
}

}  // namespace
}  // namespace adaptrt
