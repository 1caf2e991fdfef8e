#pragma once

#include "adaptrt/core/dtype.h"
#include "plugins/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Attends from all tokens, for any head_dim and any tokens_per_block: correct, and not fast.
void launch_any_size(const AttentionStep& step, DType dtype, void* stream);

}  // namespace adaptrt::cuda
