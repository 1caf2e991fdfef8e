#pragma once

#include "adaptrt/core/dtype.h"
#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Attention for the sequences with more than one token; skips other sequences. The head_dim must be one of
/// with_head_dim.
void launch_prefill(const AttentionStep& step, DType dtype, void* stream);

}  // namespace adaptrt::cuda
