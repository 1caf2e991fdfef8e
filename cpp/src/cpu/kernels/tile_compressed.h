#pragma once

// Products of bfloat16 activations with compressed panels on tile registers, with the bits of the expanded
// panels. Included after tile_gemm.h and compressed_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adaptrt/cpu/kernel_table.h"
#include "compressed_gemm.h"
#include "tile_decode_ahead.h"
#include "tile_few_rows.h"
#include "tile_gemm.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Calls at_lines after the first pieces of a row, each time with the four lines that prefetching in quarters
/// needs.
template <class StepHook>
void at_piece(std::int64_t across, StepHook* hook) {
  constexpr int kLines = 4;
  static_assert(kPiecesAcross * kPieceLines % kLines == 0);
  if (across < kPiecesAcross * kPieceLines / kLines) hook->template at_lines<kLines>();
}

/// Computes the sums of kRows rows for inputs [first, first + inputs) of a panel; `a` begins with input
/// `first`. Expands each piece in registers. The order of sums is that of multiply_few_columns.
template <int kRows, class Pieces, class StepHook>
void multiply_few_pieces(PanelExpander* expander, const Pieces& all_pieces, const FewInputs& a,
                         std::int64_t first, std::int64_t inputs, TileSums sums, StepHook* hook) {
  const Pieces pieces = all_pieces;
  alignas(kCacheLine) std::byte space[kPieceRowPairBytes];
  for (std::int64_t begin = 0; begin < inputs; begin += kStepInputs) {
    Simd::Vec even[kRows][kPiecesAcross];
    Simd::Vec odd[kRows][kPiecesAcross];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kPiecesAcross; ++v) even[r][v] = odd[r][v] = Simd::zero();
    }
    const std::int64_t end = std::min(begin + kStepInputs, inputs);
    for (std::int64_t input = begin; input < end; input += kPieceInputs) {
      const std::int64_t row = (first + input) / kPieceInputs;
      const bool has_outliers = expander->has_outliers(row + 1);
      if (has_outliers) expander->template expand<0>(row, row + 1, space, {});
      const std::byte* piece = expander->source(row);
      ADAPTRT_UNROLL
      for (int v = 0; v < kPiecesAcross; ++v) {
        Simd::Words pairs[kPiecePairs];
        if (has_outliers) {
          ADAPTRT_UNROLL
          for (int pair = 0; pair < kPiecePairs; ++pair) {
            pairs[pair] =
                Simd::load_words(space + pair * kPairRowBytes + v * kPieceOutputs * kPairBytes, Simd::kLanes);
          }
        } else {
          pieces.expand(piece + v * kCompressedPieceBytes, pairs);
        }
        ADAPTRT_UNROLL
        for (int pair = 0; pair < kPiecePairs; ++pair) {
          const Simd::Pair columns = Simd::bfloat16_pairs(pairs[pair]);
          ADAPTRT_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const float* values = a.row(r) + input + 2 * pair;
            even[r][v] = Simd::fma(Simd::set(values[0]), columns.even, even[r][v]);
            odd[r][v] = Simd::fma(Simd::set(values[1]), columns.odd, odd[r][v]);
          }
        }
        at_piece(v, hook);
      }
    }
    hook->at_step();
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kPiecesAcross; ++v) {
        float* at = sums.data + r * sums.stride + v * Simd::kLanes;
        const Simd::Vec before = sums.continues || begin > 0 ? Simd::load(at) : Simd::zero();
        Simd::store(at, Simd::add(before, Simd::add(even[r][v], odd[r][v])));
      }
    }
  }
}

/// sums [rows, kPanelColumns] = rows * `inputs` of the panel, or += if the sums continue. There are at most
/// kFewRows rows, which begin with the first of `inputs`.
template <class StepHook>
void multiply_few_compressed(PanelExpander* expander, FewRows rows, InputRange inputs, TileSums sums,
                             StepHook* hook) {
  for_few_inputs(rows, inputs.end - inputs.begin, sums,
                 [&](auto num_rows, const FewInputs& a, std::int64_t begin, std::int64_t count, TileSums to) {
                   multiply_few_pieces<num_rows()>(expander, expander->pieces(), a, inputs.begin + begin,
                                                   count, to, hook);
                 });
}

/// kSteps steps of a compressed panel in bfloat16, in two pairs of tiles of columns. The lines of a pair are
/// consecutive.
template <std::int64_t kSteps>
class ExpandedSteps {
 public:
  static constexpr std::int64_t kInputs = kSteps * kStepInputs;

  [[nodiscard]] TileColumns pair(std::int64_t column) const {
    return {bytes_ + column / kPairColumns * kPairBytesOfAll, kPairLine, kStepOfPair};
  }

  /// Expands row `panel_row` of pieces to inputs [8 * row, 8 * (row + 1)) of these steps.
  template <class StepHook>
  void expand(PanelExpander* expander, std::int64_t panel_row, std::int64_t row, StepHook* hook) {
    std::byte* lines = bytes_ + row * kPiecePairs * kPairLine;
    expander->expand_row(
        panel_row,
        [&](std::int64_t across) {
          return lines + across / kPiecesOfPair * kPairBytesOfAll + across % kPiecesOfPair * kTileLine;
        },
        kPairLine, [&](std::int64_t across) { at_piece(across, hook); });
  }

  /// Fills the lines from input `begin` to the end of its step with zeros.
  void pad(std::int64_t begin) {
    const std::int64_t line = begin / 2;
    const std::int64_t end = steps_of(begin) * kTileHeight;
    for (std::byte* of_pair : {bytes_, bytes_ + kPairBytesOfAll}) {
      std::memset(of_pair + line * kPairLine, 0, static_cast<std::size_t>((end - line) * kPairLine));
    }
  }

 private:
  static constexpr std::int64_t kStepOfPair = kTileHeight * kPairLine;
  static constexpr std::int64_t kPairBytesOfAll = kSteps * kStepOfPair;
  static constexpr std::int64_t kPiecesOfPair = kPairColumns / kPieceOutputs;
  alignas(kCacheLine) std::byte bytes_[kPanelColumns / kPairColumns * kPairBytesOfAll];
};

/// Maximum number of rows for which few steps are expanded at a time, so that the current and the next steps
/// stay in the first-level cache. With more rows, longer stretches are faster: sums are loaded and stored
/// less often.
inline constexpr std::int64_t kFewExpandedRows = 3 * kTileHeight;

/// Expands the next steps of a compressed panel while the current ones are multiplied: one row of pieces at a
/// time, spread evenly.
template <std::int64_t kSteps>
class ExpandAhead {
 public:
  /// Expands `inputs` to `out` during `steps` steps.
  ExpandAhead(PanelExpander* expander, InputRange inputs, ExpandedSteps<kSteps>* out, std::int64_t steps,
              StepPrefetch* prefetch)
      : expander_(expander),
        inputs_(inputs),
        out_(out),
        rows_((inputs.end - inputs.begin) / kPieceInputs),
        steps_(steps),
        prefetch_(prefetch) {}

  void at_step() {
    for (due_ += rows_; due_ >= steps_; due_ -= steps_) expand_row();
    prefetch_->at_step();
  }

  template <int kLines>
  void at_lines() {}

  /// Expands the remaining rows.
  void finish() {
    while (made_ < rows_) expand_row();
    if (rows_ > 0) out_->pad(inputs_.end - inputs_.begin);
  }

 private:
  void expand_row() {
    if (made_ == rows_) return;
    out_->expand(expander_, inputs_.begin / kPieceInputs + made_, made_, prefetch_);
    ++made_;
  }

  PanelExpander* expander_;
  InputRange inputs_;
  ExpandedSteps<kSteps>* out_;
  std::int64_t rows_;
  std::int64_t made_ = 0;
  std::int64_t steps_;
  std::int64_t due_ = 0;  ///< number of rows to expand, times steps_
  StepPrefetch* prefetch_;
};

/// Number of steps of tiles for the products of `inputs` with a compressed panel.
inline std::int64_t compressed_steps_taken(std::int64_t rows, InputRange inputs) {
  return kPanelColumns / kPairColumns * steps_taken(rows, kPairColumns, steps_of(inputs.end - inputs.begin));
}

/// out [rows, kPanelColumns] = `inputs` of gemm's rows * its panel, or += with gemm.accumulate and after the
/// first inputs. Multiplies kSteps steps at a time.
template <std::int64_t kSteps>
void multiply_expanded(const PanelGemm& gemm, InputRange inputs, PanelExpander* expander,
                       StepPrefetch* prefetch) {
  const StepActivations a = activations_of(gemm);
  ExpandedSteps<kSteps> space[2];
  ExpandedSteps<kSteps>* now = &space[0];
  ExpandedSteps<kSteps>* ahead = &space[1];
  const auto stretch_from = [&](std::int64_t begin) {
    return InputRange{begin, std::min(begin + ExpandedSteps<kSteps>::kInputs, inputs.end)};
  };
  InputRange stretch = stretch_from(inputs.begin);
  ExpandAhead<kSteps>(expander, stretch, now, 1, prefetch).finish();
  while (stretch.begin < inputs.end) {
    const InputRange next = stretch_from(stretch.end);
    ExpandAhead<kSteps> hook(expander, next, ahead, compressed_steps_taken(gemm.call.rows, stretch),
                             prefetch);
    for (std::int64_t column = 0; column < kPanelColumns; column += kPairColumns) {
      multiply_inputs(a, stretch.begin, stretch.end, now->pair(column),
                      {gemm.call.out + column, gemm.call.out_stride, gemm.accumulate || stretch.begin > 0},
                      gemm.call.rows, kPairColumns, &hook);
    }
    hook.finish();
    std::swap(now, ahead);
    stretch = next;
  }
}

/// Expands steps of a compressed panel, for DecodeNextStep.
class CompressedSteps {
 public:
  explicit CompressedSteps(PanelExpander* expander) : expander_(expander) {}
  static constexpr std::int64_t step_inputs() { return kStepInputs; }
  static constexpr bool leaves_lines() { return false; }
  [[nodiscard]] const std::byte* source(std::int64_t input) const {
    return expander_->source(input / kPieceInputs);
  }

  void decode(std::int64_t begin, std::int64_t end, std::byte* out, StepPrefetch* prefetch) {
    for (std::int64_t row = begin / kPieceInputs; row < end / kPieceInputs;
         ++row, out += kPieceRowPairBytes) {
      expander_->expand_row(
          row, [&](std::int64_t across) { return out + across * kTileLine; }, kStepLine,
          [&](std::int64_t across) { at_piece(across, prefetch); });
    }
  }

 private:
  PanelExpander* expander_;
};

/// Product with a compressed panel, with the bits of tile_gemm. kPiecesAreVectors: a vector has as many lanes
/// as a piece has columns, so few rows can be multiplied by pieces in registers.
template <bool kPiecesAreVectors>
void tile_compressed_gemm(const PanelGemm& gemm, std::int64_t outliers) {
  Tiles::configure();
  const InputRange inputs = part_of(gemm.call.part, gemm.call.k);
  const StepActivations a = activations_of(gemm);
  const TileSums sums{gemm.call.out, gemm.call.out_stride, gemm.accumulate || inputs.begin > 0};
  const bool in_registers = kPiecesAreVectors && gemm.call.rows <= kFewRows;
  const bool is_one_tile = !in_registers && decodes_ahead(gemm);
  const std::int64_t steps = in_registers || is_one_tile ? steps_of(inputs.end - inputs.begin)
                                                         : compressed_steps_taken(gemm.call.rows, inputs);
  PanelExpander expander(gemm.call.panel, outliers);
  CompressedSteps decoded(&expander);
  const std::byte* source = decoded.source(inputs.begin);
  const std::int64_t bytes = decoded.source(inputs.end) - source;
  StepPrefetch prefetch = is_one_tile ? prefetch_words(decoded, inputs, gemm.call.next_panel)
                                      : prefetch_of(gemm, source, bytes, gemm.call.next_panel, steps);
  SpanFetcher others(gemm.fetch);
  prefetch.add_others(&others, (others.lines() + steps - 1) / steps);
  if (in_registers) {
    if constexpr (kPiecesAreVectors) {
      multiply_few_compressed(&expander, few_rows_of(a, inputs.begin, gemm.call.rows), inputs, sums,
                              &prefetch);
    }
  } else if (is_one_tile) {
    DecodeNextStep decoder(&decoded, inputs, &prefetch);
    multiply_decoded(gemm, inputs, sums, &decoder);
  } else if (gemm.call.rows <= kFewExpandedRows) {
    multiply_expanded<kFewRowsSteps>(gemm, inputs, &expander, &prefetch);
  } else if (gemm.call.rows < kCopiedRows) {
    multiply_expanded<kStretchSteps / 2>(gemm, inputs, &expander, &prefetch);
  } else {
    multiply_expanded<kStretchSteps>(gemm, inputs, &expander, &prefetch);
  }
  others.fetch(others.lines());
}

}  // namespace
}  // namespace adaptrt
