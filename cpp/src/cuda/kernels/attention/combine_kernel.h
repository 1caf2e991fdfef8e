#pragma once

#include <cstdint>

#include "cuda/kernels/attention/softmax.h"
#include "cuda/kernels/attention/splits.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// Combines the splits of a decode, in order. A warp handles one head of a sequence.
template <typename T>
class Combine {
 public:
  struct Parameters {
    AttentionStep step;
    Splits splits;
  };
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = 8;

  __device__ static void run(const Parameters& parameters) {
    const AttentionStep& step = parameters.step;
    const Splits& splits = parameters.splits;
    const auto head = static_cast<std::int32_t>(blockIdx.x * kWarps + threadIdx.x / kWarpSize);
    const auto sequence = static_cast<std::int32_t>(blockIdx.y);
    if (head >= step.num_heads) return;
    const std::int32_t token = step.sequence_offsets[sequence];
    if (step.sequence_offsets[sequence + 1] - token != 1) return;
    const std::int32_t position = step.positions[token];
    if (block_of(step, sequence, position) < 0) return;
    const std::int32_t used = used_splits(step, splits, position);
    if (used == 1) return;  // a single split has already stored the result

    const std::int64_t first = split_index(step, splits, sequence, head);
    const float* totals = splits.totals + 2 * first;
    float maximum = kMinusInfinity;
    for (std::int32_t i = 0; i < used; ++i) maximum = fmaxf(maximum, totals[2 * i]);
    float total = 0.0F;
    for (std::int32_t i = 0; i < used; ++i)
      total += totals[2 * i + 1] * rescale_factor(totals[2 * i], maximum);

    const std::int32_t head_dim = step.head_dim;
    const float* sums = splits.sums + first * head_dim;
    T* out = static_cast<T*>(step.attended) +
             (static_cast<std::int64_t>(token) * step.num_heads + head) * head_dim;
    for (auto at = static_cast<std::int32_t>(threadIdx.x % kWarpSize) * 2; at < head_dim;
         at += 2 * kWarpSize) {
      float result[2] = {0.0F, 0.0F};
      for (std::int32_t i = 0; i < used; ++i) {
        const float factor = rescale_factor(totals[2 * i], maximum);
        result[0] += factor * sums[i * head_dim + at];
        result[1] += factor * sums[i * head_dim + at + 1];
      }
      store_words<1>(out + at, {pack_pair<T>(result[0] / total, result[1] / total)});
    }
  }
};

}  // namespace adaptrt::cuda
