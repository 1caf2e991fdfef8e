#pragma once

// Products of bfloat16 activations with plain panels on tile registers, and functions that products with
// other panels use. Included after tile_product.h and quantized_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "adaptrt/cpu/kernel_table.h"
#include "tile_few_rows.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Number of steps that are packed or decoded at once. With few rows, they stay in the first-level cache
/// until they are multiplied; with many rows, sums are loaded and stored less often.
inline constexpr std::int64_t kFewRowsSteps = 4;
inline constexpr std::int64_t kStretchSteps = 16;
inline constexpr std::int64_t kPackedRows = 2 * kTileHeight;

/// Number of bytes that a panel is prefetched ahead of its use if memory is the limit: for a panel that comes
/// from memory, and for one that was prefetched in quarters during the product before.
inline constexpr std::int64_t kFromMemoryAhead = 4096;
inline constexpr std::int64_t kFromCacheAhead = 2048;

inline std::int64_t stretch_steps(std::int64_t rows) {
  return rows <= kPackedRows ? kFewRowsSteps : kStretchSteps;
}

inline std::int64_t steps_of(std::int64_t inputs) {
  return (inputs + kStepInputs - 1) / kStepInputs;
}

/// bfloat16 rows, and the result of pack_rows for them in `steps`; nullptr if they are not packed.
struct StepActivations {
  const std::byte* rows;
  std::int64_t stride;  ///< bytes
  const std::byte* steps;
  std::int64_t step_bytes;
};

template <class Gemm>
inline StepActivations activations_of(const Gemm& gemm) {
  return {static_cast<const std::byte*>(gemm.call.a), gemm.call.a_stride * 2, gemm.a_steps,
          gemm.a_step_bytes};
}

/// At most kFewRows rows from input `begin` on.
inline FewRows few_rows_of(const StepActivations& a, std::int64_t begin, std::int64_t rows) {
  if (a.steps == nullptr || begin % kStepInputs != 0) return {a.rows + begin * 2, a.stride, rows};
  return {a.steps + begin / kStepInputs * a.step_bytes, kTileLine, rows, a.step_bytes};
}

/// sums [rows, columns] = inputs [begin, end) of rows * b, or += if the sums continue. `b` has whole steps of
/// these inputs. `steps` of the activations are used if `begin` is a multiple of kStepInputs.
template <class StepHook>
void multiply_inputs(const StepActivations& a, std::int64_t begin, std::int64_t end, TileColumns b,
                     TileSums sums, std::int64_t rows, std::int64_t columns, StepHook* hook) {
  if (rows <= kFewRows) {
    multiply_few(BFloat16Pairs(), few_rows_of(a, begin, rows), {b.data, b.line, end - begin}, columns, sums,
                 hook);
    return;
  }
  const std::int64_t steps = steps_of(end - begin);
  if (a.steps != nullptr && begin % kStepInputs == 0) {
    multiply_steps<BFloat16Dot>({a.steps + begin / kStepInputs * a.step_bytes, kTileLine, a.step_bytes}, b,
                                steps, sums, rows, columns, hook);
    return;
  }
  alignas(kCacheLine) std::byte packed[kStretchSteps * kPackedRows * kTileLine];
  constexpr std::int64_t kPackedStep = kPackedRows * kTileLine;
  for (std::int64_t row = 0; row < rows; row += kPackedRows) {
    const std::int64_t count = std::min(kPackedRows, rows - row);
    pack_steps({a.rows + row * a.stride + begin * 2, a.stride, (end - begin) * 2}, count, packed,
               kPackedStep);
    multiply_steps<BFloat16Dot>({packed, kTileLine, kPackedStep}, b, steps,
                                {sums.data + row * sums.stride, sums.stride, sums.continues}, count, columns,
                                hook);
  }
}

inline InputRange part_of(const std::optional<InputRange>& part, std::int64_t k) {
  return part.has_value() ? *part : InputRange{0, k};
}

/// Returns the prefetching during the product of `bytes` of gemm's panel in this number of steps, without
/// gemm's spans.
inline StepPrefetch prefetch_of(const PanelGemm& gemm, const std::byte* begin, std::int64_t bytes,
                                const std::byte* next, std::int64_t steps) {
  if (gemm.call.rows <= kFewRows) {
    return StepPrefetch::stream_in_quarters(begin, bytes,
                                            next == nullptr ? kFromMemoryAhead : kFromCacheAhead, next);
  }
  if (gemm.call.rows <= kTileHeight)
    return StepPrefetch::stream_in_quarters(begin, bytes, kFromMemoryAhead, next);
  return StepPrefetch::spread(next, bytes, steps);
}

/// Product with a bfloat16 panel. Tiles are loaded from the panel itself, except for a last tile of columns
/// or a last step that is partial.
void tile_gemm(const PanelGemm& gemm) {
  const InputRange inputs = part_of(gemm.call.part, gemm.call.k);
  const StepActivations a = activations_of(gemm);
  const std::int64_t line = gemm.call.width * 4;
  const auto sums_from = [&](std::int64_t begin) {
    return TileSums{gemm.call.out, gemm.call.out_stride, gemm.accumulate || begin > 0};
  };
  const auto weights_at = [&](std::int64_t input) { return gemm.call.panel + input / 2 * line; };
  const bool is_few = gemm.call.rows <= kFewRows;
  if (!is_few) Tiles::configure();
  const std::int64_t whole = (inputs.end - inputs.begin) / kStepInputs * kStepInputs;
  const std::int64_t direct_end = is_few                                ? inputs.end
                                  : gemm.call.width % kTileColumns == 0 ? inputs.begin + whole
                                                                        : inputs.begin;
  SpanFetcher others(gemm.fetch);
  // Unpacked rows are packed here, some steps at a time.
  const std::int64_t most =
      is_few || a.steps != nullptr ? direct_end - inputs.begin : kStretchSteps * kStepInputs;
  for (std::int64_t begin = inputs.begin; begin < direct_end; begin += most) {
    const std::int64_t end = std::min(begin + most, direct_end);
    const std::int64_t steps =
        is_few ? steps_of(end - begin) : steps_taken(gemm.call.rows, gemm.call.width, steps_of(end - begin));
    const std::byte* next = end < inputs.end ? weights_at(end) : gemm.call.next_panel;
    StepPrefetch prefetch = prefetch_of(gemm, weights_at(begin), (end - begin) / 2 * line, next, steps);
    prefetch.add_others(&others, (others.lines() + steps - 1) / steps);
    multiply_inputs(a, begin, end, {weights_at(begin), line, kTileHeight * line}, sums_from(begin),
                    gemm.call.rows, gemm.call.width, &prefetch);
  }
  alignas(kCacheLine) std::byte padded[kFewRowsSteps * kStepBytes];
  for (std::int64_t begin = direct_end; begin < inputs.end; begin += kFewRowsSteps * kStepInputs) {
    const std::int64_t end = std::min(begin + kFewRowsSteps * kStepInputs, inputs.end);
    for (std::int64_t step = 0; step < steps_of(end - begin); ++step) {
      const std::int64_t first = begin + step * kStepInputs;
      const std::int64_t lines = (std::min(first + kStepInputs, end) - first + 1) / 2;
      pad_step(weights_at(first), lines, gemm.call.width, padded + step * kStepBytes);
    }
    StepPrefetch nothing;
    multiply_inputs(a, begin, end, {padded, kStepLine, kStepBytes}, sums_from(begin), gemm.call.rows,
                    gemm.call.width, &nothing);
  }
  others.fetch(others.lines());
}

}  // namespace
}  // namespace adaptrt
