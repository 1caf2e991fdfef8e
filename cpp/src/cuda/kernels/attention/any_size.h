#pragma once

#include "adaptrt/core/dtype.h"
#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Attention for all tokens, with any head_dim and any tokens_per_block: correct, but slow.
void launch_any_size(const AttentionStep& step, DType dtype, void* stream);

}  // namespace adaptrt::cuda
