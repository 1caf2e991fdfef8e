#pragma once

#include "plugins/kernels/warp.h"

// What the kernels are compiled against: CUDA's runtime, or the emulation of it in tests/cpp/cuda/emulation,
// with which a C++ compiler makes functions of them that run on the host.
#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "emulation/cuda_language.h"
#endif

/// Before a loop: unrolls it, or keeps it from being unrolled, where the compiler is one that would need to
/// be told.
#ifdef __CUDACC__
#define ADAPTRT_UNROLL _Pragma("unroll")
#define ADAPTRT_NO_UNROLL _Pragma("unroll 1")
#else
#define ADAPTRT_UNROLL
#define ADAPTRT_NO_UNROLL
#endif
