#pragma once

// Multiplies a tile of rows by a panel with a codebook. Each weight is expanded and multiplied in registers;
// the bits are those of codebook_gemm. Included by codebook_gemm.h for CPUs with products of bfloat16 pairs.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "codebook_pairs.h"
#include "gemm.h"
#include "panel_stream.h"
#include "quantized_weights.h"

namespace adaptrt {
namespace {

/// Multiplies all gemm.call.rows = kRows rows by a panel of kPanelColumns outputs. kPowers: the scales may
/// all be powers of two.
template <class Words, int kRows, bool kPowers>
void codebook_tile(const PanelGemm& gemm, const Quantization& how) {
  using Weights = BFloat16Weights;
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Words::kBytes;
  constexpr std::int64_t kLineBytes = kTileVectors * kVectorBytes;
  constexpr std::int64_t kWordInputs = 2 * Words::kPairs;
  const QuantizedPanel panel = parts_of_panel(how, gemm.call.panel, gemm.call.k, kPanelColumns);
  PanelStream stream = stream_of_columns(panel, 0, kPanelColumns, Words::kBytes, gemm.call.next_panel);
  SpanFetcher others(gemm.fetch);
  const std::int64_t lines = (gemm.call.k + kWordInputs - 1) / kWordInputs;
  const std::int64_t others_a_line = (others.lines() + lines - 1) / lines;

  Simd::Vec sums[kRows][kTileVectors];
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kTileVectors; ++v) sums[r][v] = Simd::zero();
  }
  const auto* a = static_cast<const Weights::A*>(gemm.call.a);
  const std::byte* words = panel.weights;
  const auto multiply = [&](const auto& weights, std::int64_t inputs) __attribute__((always_inline)) {
    for (; inputs > 0; inputs -= kWordInputs) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kTileVectors; ++v) {
        const auto row = weights.load(words + v * kVectorBytes);
        for_each_index<Words::kPairs>([&](auto pair) __attribute__((always_inline)) {
          const Simd::Words columns = weights.template pairs<pair()>(row, v);
          ADAPTRT_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const auto value = Weights::broadcast(a + r * gemm.call.a_stride + 2 * pair());
            sums[r][v] = Weights::multiply_add(value, columns, sums[r][v]);
          }
        });
      }
      prefetch_lines<static_cast<int>(kLineBytes / kCacheLine)>(&stream);
      others.fetch(others_a_line);
      words += kLineBytes;
      a += kWordInputs;
    }
  };

  CodebookPairs<Words> scaled{Words(how.code)};
  ScaledByPowers powers(how.code);
  const std::int64_t group_size = how.group_size == 0 ? gemm.call.k : how.group_size;
  const std::int64_t group_bytes = kPanelColumns * static_cast<std::int64_t>(size_of(how.scale_type));
  const std::byte* scales = panel.scales;
  for (std::int64_t first = 0; first < gemm.call.k; first += group_size, scales += group_bytes) {
    const std::int64_t inputs = std::min(group_size, gemm.call.k - first);
    if (kPowers && powers.set_scales(scales, how.scale_type)) {
      multiply(powers, inputs);
    } else {
      scaled.set_scales(scales, how.scale_type, 0);
      multiply(scaled, inputs);
    }
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kTileVectors; ++v) {
      Simd::store(gemm.call.out + r * gemm.call.out_stride + v * Simd::kLanes, sums[r][v]);
    }
  }
}

template <class Words, bool kPowers = false, int kRows = Words::kMostRows>
void codebook_tile_of_rows(const PanelGemm& gemm, const Quantization& how) {
  if constexpr (kRows > 1) {
    if (gemm.call.rows < kRows) {
      codebook_tile_of_rows<Words, kPowers, kRows - 1>(gemm, how);
      return;
    }
  }
  codebook_tile<Words, kRows, kPowers>(gemm, how);
}

/// True if multiply_codebook_tile is faster for this number of rows. With more rows, it is faster to expand
/// the panel once, in the first-level cache.
inline bool takes_codebook_tile(std::int64_t rows, WeightCode code) {
  return rows <= (is_table(code) ? TableWords::kMostRows : CodebookByteWords::kMostRows);
}

inline void multiply_codebook_tile(const PanelGemm& gemm, const Quantization& how) {
  switch (how.code) {
    case WeightCode::kE4M3:
      codebook_tile_of_rows<Float8Words>(gemm, how);
      return;
    case WeightCode::kLLMInt8:
      codebook_tile_of_rows<LLMInt8Words>(gemm, how);
      return;
    case WeightCode::kE2M1:
      codebook_tile_of_rows<TableWords, true>(gemm, how);
      return;
    default:
      codebook_tile_of_rows<TableWords>(gemm, how);
  }
}

}  // namespace
}  // namespace adaptrt
