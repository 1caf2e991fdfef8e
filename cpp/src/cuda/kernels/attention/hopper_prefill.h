#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// True if launch_hopper_prefill has a kernel for this head_dim.
[[nodiscard]] bool has_hopper_prefill(std::int32_t head_dim);

/// launch_prefill for compute capability 9.0, plain pools and the sizes of has_hopper_prefill.
void launch_hopper_prefill(const AttentionStep& step, DType dtype, void* stream);

}  // namespace adaptrt::cuda
