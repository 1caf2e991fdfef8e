#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/attention/softmax.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/platform.h"

// The order of a token's sums. A tile of keys has its own maximum score and its own sums, which begin at
// zero. The tiles of a split are merged in the order of their keys, and then the splits in their order.
// Prefill and Decode share these functions, and all fused operations are explicit, so both give the same
// bits.
namespace adaptrt::cuda {

/// Maximum score in units of log2, and sum of the weights relative to it.
struct RowTotals {
  float maximum = kMinusInfinity;
  float total = 0.0F;
};

/// Factors that convert both addends of a merge to their common maximum.
struct MergeFactors {
  float kept;
  float added;
};

/// Merges a tile or a split into `sum`, except its values.
__device__ inline MergeFactors merge_totals(RowTotals& sum, const RowTotals& part) {
  const float maximum = fmaxf(sum.maximum, part.maximum);
  const MergeFactors factors{rescale_factor(sum.maximum, maximum), rescale_factor(part.maximum, maximum)};
  sum = {maximum, fmaf(sum.total, factors.kept, part.total * factors.added)};
  return factors;
}

__device__ inline float merge_value(float sum, float part, const MergeFactors& factors) {
  return fmaf(sum, factors.kept, part * factors.added);
}

/// Adds the weight of a head's sink, if it has one, to the total of a row's weights. A sink far above all
/// scores makes it infinite, and the row's result zero.
__device__ inline float total_with_sink(const AttentionStep& step, std::int32_t head, const RowTotals& row) {
  if (step.sinks == nullptr) return row.total;
  constexpr float kLog2E = 1.44269504F;
  return row.total + power_of_two(rounded_product(step.sinks[head], kLog2E) - row.maximum);
}

/// Masks keys outside [begin, end), relative to the tile's first key, for a row of mma results: half 0 is the
/// row lane / 4, half 1 the row lane / 4 + 8.
template <int kColumns>
__device__ inline void apply_mask(float (&scores)[kColumns][4], int half, int lane, std::int32_t begin,
                                  std::int32_t end) {
  ADAPTRT_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    ADAPTRT_UNROLL
    for (int element = 0; element < 2; ++element) {
      const int key = 8 * column + 2 * (lane % 4) + element;
      if (key < begin || key >= end) scores[column][2 * half + element] = kMinusInfinity;
    }
  }
}

/// Warp: converts a row's unscaled scores to weights relative to the row's maximum in this tile.
template <int kColumns>
__device__ inline RowTotals weigh_tile(float (&scores)[kColumns][4], int half, float scale) {
  float maximum = kMinusInfinity;
  ADAPTRT_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    maximum = fmaxf(maximum, fmaxf(scores[column][2 * half], scores[column][2 * half + 1]));
  }
  maximum = row_maximum(maximum) * scale;
  const float offset = maximum == kMinusInfinity ? 0.0F : maximum;
  float total = 0.0F;
  ADAPTRT_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    ADAPTRT_UNROLL
    for (int element = 2 * half; element < 2 * half + 2; ++element) {
      const float weight = power_of_two(fmaf(scores[column][element], scale, -offset));
      scores[column][element] = weight;
      total += weight;
    }
  }
  return {maximum, row_sum(total)};
}

}  // namespace adaptrt::cuda
