#pragma once

#include <cstdint>

#include "cuda/kernels/attention/splits.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/tile_sums.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// Combines the splits of a decode, in order. A warp handles one head of a sequence.
template <typename T, int kHeadDim>
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
    allow_next_kernel();
    wait_for_previous_kernel();
    const AttentionStep& step = parameters.step;
    const Splits& splits = parameters.splits;
    const auto head = static_cast<std::int32_t>(blockIdx.x * kWarps + threadIdx.x / kWarpSize);
    const auto sequence = static_cast<std::int32_t>(blockIdx.y);
    if (head >= step.num_heads) return;
    const std::int32_t token = step.sequence_offsets[sequence];
    if (step.sequence_offsets[sequence + 1] - token != 1) return;
    const std::int32_t position = step.positions[token];
    if (block_of(step, sequence, position) < 0) return;
    const std::int32_t used = splits_of<kTileKeys<kHeadDim>>(step, position).count();
    if (used == 1) return;  // a single split has already stored the result

    const std::int64_t first = split_index(step, splits, sequence, head);
    const auto lane = static_cast<std::int32_t>(threadIdx.x % kWarpSize);
    // A sequence has fewer splits than a warp has threads.
    RowTotals own;
    if (lane < used) own = {splits.totals[2 * (first + lane)], splits.totals[2 * (first + lane) + 1]};
    RowTotals total;
    float values[kPasses][kWidth] = {};
    for (std::int32_t begin = 0; begin < used; begin += kTogether) {
      float parts[kTogether][kPasses][kWidth] = {};
      ADAPTRT_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        ADAPTRT_UNROLL
        for (int pass = 0; pass < kPasses; ++pass) {
          const std::int32_t at = (pass * kWarpSize + lane) * kWidth;
          if (begin + i < used && at < kHeadDim) {
            const float* from = splits.sums + (first + begin + i) * kHeadDim + at;
            ADAPTRT_UNROLL
            for (int element = 0; element < kWidth; ++element) parts[i][pass][element] = from[element];
          }
        }
      }
      ADAPTRT_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i >= used) break;
        const RowTotals part{__shfl_sync(kAllLanes, own.maximum, begin + i),
                             __shfl_sync(kAllLanes, own.total, begin + i)};
        const MergeFactors factors = merge_totals(total, part);
        ADAPTRT_UNROLL
        for (int pass = 0; pass < kPasses; ++pass) {
          ADAPTRT_UNROLL
          for (int element = 0; element < kWidth; ++element) {
            values[pass][element] = merge_value(values[pass][element], parts[i][pass][element], factors);
          }
        }
      }
    }
    const float inverse = 1.0F / total_with_sink(step, head, total);
    T* out = static_cast<T*>(step.attended) +
             (static_cast<std::int64_t>(token) * step.num_heads + head) * kHeadDim;
    ADAPTRT_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::int32_t at = (pass * kWarpSize + lane) * kWidth;
      if (at >= kHeadDim) continue;
      store_words<1>(out + at, {pack_pair<T>(values[pass][0] * inverse, values[pass][1] * inverse)});
    }
  }

 private:
  static constexpr int kWidth = 2;
  static constexpr int kPasses = (kHeadDim + kWidth * kWarpSize - 1) / (kWidth * kWarpSize);
  static constexpr int kTogether = kHeadDim <= 128 ? 8 : 4;  // splits whose sums are loaded at a time
};

}  // namespace adaptrt::cuda
