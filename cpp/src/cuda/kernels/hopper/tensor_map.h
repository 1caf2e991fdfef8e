#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"
#ifdef __CUDACC__
#include <cuda.h>
#else
#include "emulation/tensor_map_emulated.h"
#endif

namespace adaptrt::cuda {

/// Describes boxes of `box_rows` rows and 64 columns of a matrix of 2-byte elements. A copied box has rows of
/// 128 bytes, whose 16-byte pieces are exchanged (the 128-byte swizzle). Throws StepError.
CUtensorMap map_of(DType dtype, const void* matrix, std::int64_t rows, std::int64_t columns, int box_rows);

}  // namespace adaptrt::cuda
