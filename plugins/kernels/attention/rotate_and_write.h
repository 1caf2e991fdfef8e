#pragma once

#include "adaptrt/core/dtype.h"
#include "plugins/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Turns queries and keys by their positions' angles, the queries to rotated_query and the keys, with the
/// values, to the blocks of the pool. A token without a sequence or a block gets a result of zeros instead,
/// and is left alone by the other kernels.
void launch_rotate_and_write(const AttentionStep& step, DType dtype, void* stream);

}  // namespace adaptrt::cuda
