#pragma once

#include <cstdint>

#include "adaptrt/cuda/state_kernels.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/rows/checks.h"

namespace adaptrt::cuda::states {

/// Most sequences and heads of a launch: CUDA's maximum of a grid's y and z.
inline constexpr std::int64_t kMaxLanes = 65535;

/// One sequence of a run.
struct Sequence {
  std::int64_t begin;  ///< its first row
  std::int64_t end;
  float* state;  ///< of the layer; nullptr: zeros, which are not kept

  __device__ Sequence(const SequenceStates& all, std::int64_t index)
      : begin(all.sequence_offsets[index]), end(all.sequence_offsets[index + 1]) {
    const std::int32_t slot = all.slots[index];
    state = slot < 0 ? nullptr : all.states + slot * all.slot_stride;
  }
};

inline void check(rows::Checks* checks, const SequenceStates& states) {
  checks->count("sequences", states.sequences, kMaxLanes).count("slot_stride", states.slot_stride);
}

}  // namespace adaptrt::cuda::states
