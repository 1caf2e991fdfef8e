#pragma once

#include "cuda/kernels/warp.h"

// The kernels include CUDA's runtime, or its emulation in tests/cpp/cuda/emulation, with which a C++ compiler
// builds them to run on the host.
#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "emulation/cuda_language.h"
#endif

/// Put before a loop: unrolls it, or prevents unrolling, for compilers that need the hint.
#ifdef __CUDACC__
#define ADAPTRT_UNROLL _Pragma("unroll")
#define ADAPTRT_NO_UNROLL _Pragma("unroll 1")
#else
#define ADAPTRT_UNROLL
#define ADAPTRT_NO_UNROLL
#endif
