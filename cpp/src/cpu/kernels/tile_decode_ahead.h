#pragma once

// Products of one tile of rows with panels of few bits: the next step is decoded while the current one is
// multiplied. Included after tile_gemm.h, codebook_gemm.h and quantized_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codebook_gemm.h"
#include "quantized_gemm.h"
#include "tile_gemm.h"
#include "tile_groups.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Lets expand_columns and CodebookExpander prefetch with a StepPrefetch.
struct FetchWith {
  StepPrefetch* prefetch;
  template <int kLines>
  void at_lines(const std::byte*) const {
    prefetch->at_lines<kLines>();
  }
};

/// Decodes steps of a quantised panel of kPanelColumns columns, for DecodeNextStep.
template <class Packed>
class QuantizedSteps {
 public:
  QuantizedSteps(const QuantizedGemm& gemm, const QuantizedPanel& panel)
      : decoder_(decoder_of<Packed>(gemm.quantization)),
        weights_(panel.weights),
        group_size_(group_size_of(gemm)) {}

  /// Address of the words of an input, which must be the first of a word.
  [[nodiscard]] const std::byte* source(std::int64_t input) const {
    return weights_ + input / kWordInputs * kWordLines<Packed> * kLineBytes;
  }

  /// The groups of half a step alternate between two places, so that each place has zeros in the same half.
  [[nodiscard]] std::int64_t step_inputs() const {
    return is_half_step(group_size_) ? group_size_ : kStepInputs;
  }
  [[nodiscard]] bool leaves_lines() const { return is_half_step(group_size_); }

  /// Writes inputs [begin, end), at most a step, to `out`.
  void decode(std::int64_t begin, std::int64_t end, std::byte* out, StepPrefetch* prefetch) const {
    constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
    static_assert(kPanelColumns % kGroup == 0);
    const std::int64_t units = (end - begin + Packed::kInterleave - 1) / Packed::kInterleave;
    out += first_line_of(group_size_, begin) * kStepLine;
    for (std::int64_t column = 0; column < kPanelColumns; column += kGroup) {
      expand_columns<Packed, kTileVectors>(decoder_, source(begin) + column * Packed::kColumnBytes,
                                           kPanelColumns, units, Simd::kLanes, out + column * kExpandedBytes,
                                           kStepLine, FetchWith{prefetch});
    }
  }

 private:
  static constexpr std::int64_t kWordInputs = Packed::kUnits * Packed::kInterleave;
  static constexpr std::int64_t kLineBytes = kPanelColumns * Packed::kColumnBytes;
  static_assert(kStepInputs % kWordInputs == 0);
  Packed decoder_;
  const std::byte* weights_;
  std::int64_t group_size_;
};

/// The same for a panel with a codebook.
class CodebookSteps {
 public:
  CodebookSteps(const PanelGemm& gemm, const Quantization& how)
      : expander_(gemm.call.panel, how, gemm.call.k, kPanelColumns) {}
  [[nodiscard]] const std::byte* source(std::int64_t input) const { return expander_.source(input); }
  static constexpr std::int64_t step_inputs() { return kStepInputs; }
  static constexpr bool leaves_lines() { return false; }
  void decode(std::int64_t begin, std::int64_t end, std::byte* out, StepPrefetch* prefetch) const {
    expander_.expand(begin, end, out, kPanelColumns, FetchWith{prefetch});
  }

 private:
  CodebookExpander<CodebookBFloat16> expander_;
};

/// A StepHook that decodes the next step of a panel while a tile of rows is multiplied by the current one.
/// Steps alternate between two places.
///
/// `Steps` knows the kind of weights: source(input) is the address of the words of an input, step_inputs()
/// the number of inputs in a step, and decode(begin, end, out, prefetch) decodes at most one step.
/// leaves_lines() is true if decode() does not write all lines of a step; the others are zeros.
template <class Steps>
class DecodeNextStep {
 public:
  /// Decodes the first step of `inputs`.
  DecodeNextStep(Steps* steps, InputRange inputs, StepPrefetch* prefetch)
      : steps_(steps), next_(inputs.begin), end_(inputs.end), prefetch_(prefetch) {
    if (steps_->leaves_lines()) std::memset(places_, 0, sizeof(places_));
    at_step();
  }

  /// The steps, starting with the one that was decoded last.
  [[nodiscard]] TileColumns columns() const {
    return {places_, kStepLine, kStepBytes, kPlaces - 1, made_ - 1};
  }

  void at_step() {
    std::byte* out = places_ + made_++ % kPlaces * kStepBytes;
    prefetch_->at_step();
    if (next_ >= end_) return;
    const std::int64_t step = steps_->step_inputs();
    const std::int64_t end = std::min(next_ + step, end_);
    if (end - next_ < step) std::memset(out, 0, kStepBytes);
    steps_->decode(next_, end, out, prefetch_);
    next_ = end;
  }

  template <int kLines>
  void at_lines() {}

 private:
  static constexpr std::int64_t kPlaces = 2;
  Steps* steps_;
  std::int64_t next_;
  std::int64_t end_;
  std::int64_t made_ = 0;  ///< number of decoded steps
  StepPrefetch* prefetch_;
  alignas(kCacheLine) std::byte places_[kPlaces * kStepBytes];
};

/// True if gemm has at most one tile of rows, which are packed, and a full panel. Then DecodeNextStep is
/// used.
template <class Gemm>
bool decodes_ahead(const Gemm& gemm) {
  return gemm.call.rows <= kTileHeight && gemm.call.width == kPanelColumns && gemm.a_steps != nullptr;
}

/// Prefetches a panel's words [begin, end), and those of the next panel.
inline StepPrefetch prefetch_words(const std::byte* begin, const std::byte* end,
                                   const std::byte* next_panel) {
  return StepPrefetch::stream_in_quarters(begin, end - begin, kFromCacheAhead, next_panel);
}

/// The same for the words of `inputs`.
template <class Steps>
StepPrefetch prefetch_words(const Steps& steps, InputRange inputs, const std::byte* next_panel) {
  return prefetch_words(steps.source(inputs.begin), steps.source(inputs.end), next_panel);
}

/// sums [count, kPanelColumns] = `steps` steps of a tile of rows * the steps that `decoder` decodes, or += if
/// the sums continue.
template <class Dot, class Steps>
void multiply_decoded(TileRows rows, std::int64_t steps, TileSums sums, std::int64_t count,
                      DecodeNextStep<Steps>* decoder) {
  const auto multiply = [&](TileSums to) {
    multiply_1xn<Dot, kPanelColumns / kTileColumns>(rows, decoder->columns(), steps, to, decoder);
  };
  if (count == kTileHeight) {
    multiply(sums);
  } else {
    with_whole_tiles<kTileHeight, kPanelColumns>(sums, count, kPanelColumns, multiply);
  }
}

/// The same for `inputs` of gemm's packed rows.
template <class Gemm, class Steps>
void multiply_decoded(const Gemm& gemm, InputRange inputs, TileSums sums, DecodeNextStep<Steps>* decoder) {
  const TileRows rows{gemm.a_steps + inputs.begin / kStepInputs * gemm.a_step_bytes, kTileLine,
                      gemm.a_step_bytes};
  multiply_decoded<BFloat16Dot>(rows, steps_of(inputs.end - inputs.begin), sums, gemm.call.rows, decoder);
}

}  // namespace
}  // namespace adaptrt
