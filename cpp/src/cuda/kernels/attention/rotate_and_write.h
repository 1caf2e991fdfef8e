#pragma once

#include <cstdint>
#include <span>

#include "adaptrt/core/dtype.h"
#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Applies the rotary embedding. Queries go to rotated_query; keys and values go to the blocks of the pool. A
/// token without a sequence or a block gets a zero result instead, and the other kernels skip it. `counters`
/// become zero.
void launch_rotate_and_write(const AttentionStep& step, std::span<std::uint32_t> counters, DType dtype,
                             void* stream);

}  // namespace adaptrt::cuda
