#pragma once

#include "ops/linear_work.h"

namespace adaptrt {

/// A layer whose input has zeros: where a few rows leave so many inputs out that it is worth it, or where no
/// other weights are in memory, weights of the others alone are read. The bits are run_linear's.
void run_sparse_input(LinearWork* work, const Step& step);

}  // namespace adaptrt
