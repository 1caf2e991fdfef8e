#pragma once

#include "adaptrt/core/dtype.h"
#include "plugins/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Attends from the tokens of the sequences that have more than one token; leaves the others alone. The
/// head_dim is one of with_head_dim.
void launch_prefill(const AttentionStep& step, DType dtype, void* stream);

}  // namespace adaptrt::cuda
