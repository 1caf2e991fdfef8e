#pragma once

#include <cuda.h>

#include <cstdint>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda::product {

/// Describes boxes of `box_rows` rows and 64 columns of a matrix of 2-byte elements. Throws StepError.
CUtensorMap map_of(DType dtype, const void* matrix, std::int64_t rows, std::int64_t columns, int box_rows);

}  // namespace adaptrt::cuda::product
