#pragma once

// W8A8 on tile registers, with the bits of int8_gemm.h: sums of integers are exact. Included after
// tile_product.h and int8_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/cpu/kernel_table.h"
#include "int8_gemm.h"
#include "tile_gemm.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Inputs of a step of int8.
inline constexpr std::int64_t kInt8StepInputs = 64;

/// Converts the sums of integers in the output to the result.
inline void finish_int8(const Int8Gemm& gemm, const QuantizedPanel& panel) {
  for (std::int64_t column = 0; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    // Activations are stored with 128 added.
    const Simd::Words excess = Simd::load_words(panel.extra + column * 4, lanes);
    const Simd::Vec scale = Simd::load(reinterpret_cast<const float*>(panel.scales) + column, lanes);
    for (std::int64_t row = 0; row < gemm.call.rows; ++row) {
      float* out = gemm.call.out + row * gemm.call.out_stride + column;
      const Simd::Words sum = Simd::load_words(reinterpret_cast<const std::byte*>(out), lanes);
      const Simd::Vec value = Simd::words_to_floats(Simd::subtract_words(sum, excess));
      Simd::store(out, Simd::mul(Simd::mul(value, scale), Simd::set(gemm.a_scales[row])), lanes);
    }
  }
}

/// out = inputs [begin, end) of rows * b, or += if begin > 0. `b` has whole steps of these inputs. Tiles are
/// loaded from the rows themselves, except for a partial last tile of rows and inputs with a partial step.
inline void multiply_int8(const Int8Gemm& gemm, std::int64_t begin, std::int64_t end, TileColumns b,
                          StepPrefetch* prefetch) {
  const std::int64_t steps = (end - begin + kInt8StepInputs - 1) / kInt8StepInputs;
  const std::byte* a = static_cast<const std::byte*>(gemm.call.a) + begin;
  const bool whole_steps = (end - begin) % kInt8StepInputs == 0;
  const std::int64_t direct = whole_steps ? gemm.call.rows / kTileHeight * kTileHeight : 0;
  if (direct > 0) {
    multiply_steps<Int8Dot>({a, gemm.call.a_stride, kTileLine}, b, steps,
                            {gemm.call.out, gemm.call.out_stride, begin > 0}, direct, gemm.call.width,
                            prefetch);
  }
  alignas(kCacheLine) std::byte packed[kStretchSteps * kPackedRows * kTileLine];
  constexpr std::int64_t kPackedStep = kPackedRows * kTileLine;
  for (std::int64_t row = direct; row < gemm.call.rows; row += kPackedRows) {
    const std::int64_t rows = std::min(kPackedRows, gemm.call.rows - row);
    for (std::int64_t first = 0; first < steps; first += kStretchSteps) {
      const std::int64_t count = std::min(kStretchSteps, steps - first);
      const std::int64_t bytes = std::min(count * kTileLine, end - begin - first * kTileLine);
      pack_steps({a + row * gemm.call.a_stride + first * kTileLine, gemm.call.a_stride, bytes}, rows, packed,
                 kPackedStep);
      multiply_steps<Int8Dot>(
          {packed, kTileLine, kPackedStep}, {b.data + first * b.step, b.line, b.step}, count,
          {gemm.call.out + row * gemm.call.out_stride, gemm.call.out_stride, begin + first > 0}, rows,
          gemm.call.width, prefetch);
    }
  }
}

/// Multiplies all inputs of at most kFewRows rows with vectors, which read memory faster than tiles.
inline void int8_few_rows(const Int8Gemm& gemm, const QuantizedPanel& panel) {
  constexpr int kMostRows = static_cast<int>(kFewRows);
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  constexpr int kLines = static_cast<int>(kGroup * 4 / kCacheLine);
  const std::int64_t line = gemm.call.width * 4;
  const Int8Part whole{0, (gemm.call.k + 3) / 4, (gemm.call.k + 3) / 4};
  std::int64_t column = 0;
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    const auto prefetch = StepPrefetch::stream_in_quarters(panel.weights + column * 4, whole.steps * line,
                                                           kFromCacheAhead, gemm.call.next_panel);
    int8_rows<kTileVectors, false, kLines, kMostRows>(gemm, panel, whole, 0, gemm.call.rows, column,
                                                      Simd::kLanes, prefetch);
  }
  for (; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    int8_rows<1, true, 0, kMostRows>(gemm, panel, whole, 0, gemm.call.rows, column, lanes, Prefetch{});
  }
}

void tile_int8_gemm(const Int8Gemm& gemm) {
  const QuantizedPanel panel =
      parts_of_panel({.algo = QuantAlgo::kW8A8}, gemm.call.panel, gemm.call.k, gemm.call.width);
  if (gemm.call.rows <= kFewRows && !gemm.call.part.has_value()) {
    int8_few_rows(gemm, panel);
    return;
  }
  Tiles::configure();
  const InputRange inputs = part_of(gemm.call.part, gemm.call.k);
  const std::int64_t line = gemm.call.width * 4;
  const auto weights_at = [&](std::int64_t input) { return panel.weights + input / 4 * line; };
  const std::int64_t direct_end =
      gemm.call.width % kTileColumns == 0
          ? inputs.begin + (inputs.end - inputs.begin) / kInt8StepInputs * kInt8StepInputs
          : inputs.begin;
  if (direct_end > inputs.begin) {
    const std::int64_t steps = (direct_end - inputs.begin) / kInt8StepInputs;
    const std::byte* next = inputs.end < gemm.call.k ? weights_at(inputs.end) : gemm.call.next_panel;
    const std::int64_t bytes = steps * kTileHeight * line;
    StepPrefetch prefetch =
        gemm.call.rows <= kTileHeight
            ? StepPrefetch::stream(weights_at(inputs.begin), bytes, kFromMemoryAhead, next)
            : StepPrefetch::spread(next, bytes, steps_taken(gemm.call.rows, gemm.call.width, steps));
    multiply_int8(gemm, inputs.begin, direct_end, {weights_at(inputs.begin), line, kTileHeight * line},
                  &prefetch);
  }
  alignas(kCacheLine) std::byte padded[kStepBytes];
  for (std::int64_t begin = direct_end; begin < inputs.end; begin += kInt8StepInputs) {
    const std::int64_t end = std::min(begin + kInt8StepInputs, inputs.end);
    pad_step(weights_at(begin), (end - begin + 3) / 4, gemm.call.width, padded);
    StepPrefetch nothing;
    multiply_int8(gemm, begin, end, {padded, kStepLine, kStepBytes}, &nothing);
  }
  if (inputs.end == gemm.call.k) finish_int8(gemm, panel);
}

}  // namespace
}  // namespace adaptrt
