#pragma once

#include <cstdint>

#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Distribution of a decode's keys over blocks. Each split that has keys stores the sums of its weighted
/// values, relative to its maximum score. A sequence whose keys are all in one split needs no such sums.
struct Splits {
  std::int32_t count;     // per sequence, including splits without keys
  std::int32_t num_keys;  // keys per split, a multiple of kKeysOfSplitStep
  float* sums;            // [sequences, num_heads, count, head_dim]; nullptr when count is 1
  float* totals;  // [sequences, num_heads, count, 2]: maximum score in units of log2, sum of the weights
};

/// Keys that the warps of a block process at a time.
inline constexpr std::int32_t kKeysOfSplitStep = 64;
/// Splits begin at multiples of this: the size of a warp's tile of keys.
inline constexpr std::int32_t kSplitAlignment = 16;

struct KeyRange {
  std::int32_t begin;
  std::int32_t end;
};

__device__ inline std::int32_t first_split_key(const AttentionStep& step, std::int32_t position) {
  return first_visible(step, position) / kSplitAlignment * kSplitAlignment;
}

/// Keys of a split, from the first key of its first tile; empty if begin >= end.
__device__ inline KeyRange keys_of_split(const AttentionStep& step, const Splits& splits,
                                         std::int32_t position, std::int32_t split) {
  const std::int32_t begin = first_split_key(step, position) + split * splits.num_keys;
  const std::int32_t end = begin + splits.num_keys;
  return {begin, end < position + 1 ? end : position + 1};
}

/// Number of splits that have keys.
__device__ inline std::int32_t used_splits(const AttentionStep& step, const Splits& splits,
                                           std::int32_t position) {
  return (position - first_split_key(step, position)) / splits.num_keys + 1;
}

/// Index of the first split of a head.
__device__ inline std::int64_t split_index(const AttentionStep& step, const Splits& splits,
                                           std::int32_t sequence, std::int32_t head) {
  return (static_cast<std::int64_t>(sequence) * step.num_heads + head) * splits.count;
}

}  // namespace adaptrt::cuda
