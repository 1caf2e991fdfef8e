#pragma once

// Products of bfloat16 activations with panels of few bits on tile registers. Included after tile_gemm.h,
// codebook_gemm.h and quantized_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adaptrt/cpu/kernel_table.h"
#include "codebook_gemm.h"
#include "quantized_gemm.h"
#include "tile_decode_ahead.h"
#include "tile_few_rows.h"
#include "tile_gemm.h"
#include "tile_groups.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Product with a panel with a codebook, with the bits of tile_gemm for the expanded panel.
void tile_codebook_gemm(const PanelGemm& gemm, const Quantization& how) {
  Tiles::configure();
  SpanFetcher others(gemm.fetch);
  others.fetch(others.lines());
  const InputRange inputs = part_of(gemm.call.part, gemm.call.k);
  if (decodes_ahead(gemm)) {
    CodebookSteps steps(gemm, how);
    StepPrefetch prefetch = prefetch_words(steps, inputs, gemm.call.next_panel);
    DecodeNextStep decoder(&steps, inputs, &prefetch);
    multiply_decoded(gemm, inputs, {gemm.call.out, gemm.call.out_stride, gemm.accumulate || inputs.begin > 0},
                     &decoder);
    return;
  }
  const StepActivations a = activations_of(gemm);
  alignas(kCacheLine) std::byte made[kStretchSteps * kStepBytes];
  const CodebookExpander<CodebookBFloat16> expander(gemm.call.panel, how, gemm.call.k, kPanelColumns);
  const std::int64_t most = stretch_steps(gemm.call.rows) * kStepInputs;
  for (std::int64_t begin = inputs.begin; begin < inputs.end; begin += most) {
    const std::int64_t end = std::min(begin + most, inputs.end);
    expander.expand(begin, end, made, kPanelColumns);
    const std::int64_t bytes = (end - begin) * kPanelColumns * 2;
    const std::int64_t whole = steps_of(end - begin) * kStepBytes;
    if (bytes < whole) std::memset(made + bytes, 0, static_cast<std::size_t>(whole - bytes));
    StepPrefetch nothing;
    multiply_inputs(a, begin, end, {made, kStepLine, kStepBytes},
                    {gemm.call.out, gemm.call.out_stride, gemm.accumulate || begin > 0}, gemm.call.rows,
                    kPanelColumns, &nothing);
  }
}

/// Decodes inputs [begin, end) of a quantised panel into whole steps of kPanelColumns columns, padded with
/// zeros.
template <class Packed>
void decode_steps(const QuantizedGemm& gemm, const QuantizedPanel& panel, std::int64_t begin,
                  std::int64_t end, std::byte* out) {
  constexpr std::int64_t kWordInputs = Packed::kUnits * Packed::kInterleave;
  const auto decoder = decoder_of<Packed>(gemm.quantization);
  const std::int64_t units = (end - begin + Packed::kInterleave - 1) / Packed::kInterleave;
  const std::int64_t steps = steps_of(end - begin);
  if (gemm.call.width < kPanelColumns || units % kTileHeight != 0) std::memset(out, 0, steps * kStepBytes);
  out += first_line_of(group_size_of(gemm), begin) * kStepLine;
  const std::byte* words =
      panel.weights + begin / kWordInputs * kWordLines<Packed> * gemm.call.width * Packed::kColumnBytes;
  std::int64_t column = 0;
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    expand_columns<Packed, kTileVectors>(decoder, words + column * Packed::kColumnBytes, gemm.call.width,
                                         units, Simd::kLanes, out + column * kExpandedBytes, kStepLine);
  }
  for (; column < gemm.call.width; column += Simd::kLanes) {
    expand_columns<Packed, 1>(decoder, words + column * Packed::kColumnBytes, gemm.call.width, units,
                              std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column),
                              out + column * kExpandedBytes, kStepLine);
  }
}

/// Like decode_steps, for a panel of kPanelColumns columns. Stores each pair of tiles of columns separately,
/// kPairStretch * kPairStepBytes after the pair before.
template <class Packed>
void decode_pairs(const QuantizedGemm& gemm, const QuantizedPanel& panel, std::int64_t begin,
                  std::int64_t end, std::byte* out) {
  constexpr std::int64_t kWordInputs = Packed::kUnits * Packed::kInterleave;
  constexpr int kVectors =
      static_cast<int>(std::min<std::int64_t>(kTileVectors, kPairColumns / Simd::kLanes));
  const auto decoder = decoder_of<Packed>(gemm.quantization);
  const std::int64_t units = (end - begin + Packed::kInterleave - 1) / Packed::kInterleave;
  const std::int64_t first_line = first_line_of(group_size_of(gemm), begin);
  const std::byte* words =
      panel.weights + begin / kWordInputs * kWordLines<Packed> * kPanelColumns * Packed::kColumnBytes;
  for (std::int64_t pair = 0; pair < kPanelColumns;
       pair += kPairColumns, out += kPairStretch * kPairStepBytes) {
    if (units % kTileHeight != 0) std::memset(out, 0, steps_of(end - begin) * kPairStepBytes);
    for (std::int64_t column = 0; column < kPairColumns; column += kVectors * Simd::kLanes) {
      expand_columns<Packed, kVectors>(decoder, words + (pair + column) * Packed::kColumnBytes, kPanelColumns,
                                       units, Simd::kLanes,
                                       out + first_line * kPairLine + column * kExpandedBytes, kPairLine);
    }
  }
}

/// Decoders for a panel's weights: for tiles, and for few rows.
struct Int8Panel {
  using Tiled = Int8BFloat16;
  using Few = Int8Pairs;
};
struct TilePanels {
  struct Int4 {
    using Tiled = Int4BFloat16;
    using Few = Int4Pairs;
  };
  template <int kBits>
  struct Narrow {
    using Tiled = NarrowBFloat16<kBits>;
    using Few = NarrowPairs<kBits>;
  };
};

/// Multiplies few rows, and decodes the panel in registers.
template <class Packed>
void multiply_few_rows(const QuantizedGemm& gemm, const QuantizedPanel& panel, InputRange inputs) {
  constexpr std::int64_t kWordInputs = 2 * Packed::kUnits;
  const std::int64_t line = gemm.call.width * Packed::kColumnBytes;
  const auto words_at = [&](std::int64_t input) {
    return panel.weights + input / kWordInputs * kWordLines<Packed> * line;
  };
  StepPrefetch prefetch = prefetch_words(words_at(inputs.begin), words_at(inputs.end), gemm.call.next_panel);
  const StepActivations a = activations_of(gemm);
  const auto decoder = decoder_of<Packed>(gemm.quantization);
  multiply_by_groups(gemm, panel, inputs, [&](InputRange some, TileSums sums) {
    multiply_few(decoder, few_rows_of(a, some.begin, gemm.call.rows),
                 {words_at(some.begin), line, some.end - some.begin}, gemm.call.width, sums, &prefetch);
  });
}

/// Multiplies one tile of rows, and decodes the panel one step ahead.
template <class Packed>
void multiply_one_tile(const QuantizedGemm& gemm, const QuantizedPanel& panel, InputRange inputs) {
  QuantizedSteps<Packed> steps(gemm, panel);
  StepPrefetch prefetch = prefetch_words(steps, inputs, gemm.call.next_panel);
  DecodeNextStep decoder(&steps, inputs, &prefetch);
  multiply_by_groups(gemm, panel, inputs,
                     [&](InputRange some, TileSums sums) { multiply_decoded(gemm, some, sums, &decoder); });
}

template <class Panel>
void tile_quantized_gemm_of(const QuantizedGemm& gemm) {
  const InputRange inputs = part_of(gemm.call.part, gemm.call.k);
  const QuantizedPanel panel = parts_of(gemm);
  const std::int64_t size = group_size_of(gemm);
  const bool has_steps =
      group_count(gemm.quantization, gemm.call.k) == 1 || size % kStepInputs == 0 || is_half_step(size);
  // A single row is multiplied faster if the panel is decoded in registers.
  if (decodes_ahead(gemm) && has_steps && gemm.call.rows > 1) {
    multiply_one_tile<typename Panel::Tiled>(gemm, panel, inputs);
  } else if (gemm.call.rows <= kFewRows) {
    multiply_few_rows<typename Panel::Few>(gemm, panel, inputs);
  } else if (group_count(gemm.quantization, gemm.call.k) == 1) {
    multiply_one_group(gemm, panel, &decode_steps<typename Panel::Tiled>, inputs);
  } else {
    using Tiled = typename Panel::Tiled;
    GroupedProduct(gemm, panel, &decode_steps<Tiled>, &decode_pairs<Tiled>).run(inputs);
  }
}

void tile_quantized_gemm(const QuantizedGemm& gemm) {
  Tiles::configure();
  if (gemm.quantization.algo != QuantAlgo::kW4A16) {
    tile_quantized_gemm_of<Int8Panel>(gemm);
    return;
  }
  with_bits<TilePanels>(gemm.quantization,
                        [&]<class Panel>(std::type_identity<Panel>) { tile_quantized_gemm_of<Panel>(gemm); });
}

}  // namespace
}  // namespace adaptrt
