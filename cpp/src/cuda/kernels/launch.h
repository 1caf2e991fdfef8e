#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "adaptrt/core/error.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#ifndef __CUDACC__
#include "emulation/grid.h"
#include "emulation/stream.h"
#endif

namespace adaptrt::cuda {

/// Number of blocks of a grid, and bytes of dynamic shared memory per block.
struct LaunchShape {
  std::uint32_t x = 1;
  std::uint32_t y = 1;
  std::uint32_t z = 1;
  std::size_t shared_bytes = 0;
  /// The kernel may start before the previous one ends, and calls wait_for_previous_kernel() itself. Machine
  /// code for GPUs before sm_90 has no such wait, so it starts after the previous kernel.
  bool overlaps_previous = false;
};

/// A kernel is a class with
///   using Parameters = <trivially copyable struct>;
///   static constexpr int kThreads;                   threads per block, a multiple of 32
///   static constexpr int kBlocksPerMultiprocessor;   as in __launch_bounds__
///   __device__ static void run(const Parameters& parameters);
#ifdef __CUDACC__

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerMultiprocessor)
    kernel_entry(const __grid_constant__ typename Kernel::Parameters parameters) {
  Kernel::run(parameters);
}

/// Dynamic shared memory that a block may use without asking for more.
inline constexpr std::size_t kDefaultSharedBytes = 48 * 1024;

inline void throw_on_cuda_error(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw StepError(std::string(what) + ": " + cudaGetErrorString(error));
}

/// True if the machine code of a kernel for the current device waits in wait_for_previous_kernel().
template <typename Kernel>
bool waits_for_previous_kernel() {
  constexpr int kFirstVersion = 90;
  thread_local int known_device = -1;
  thread_local bool waits = false;
  int device = 0;
  throw_on_cuda_error(cudaGetDevice(&device), "the current device");
  if (device != known_device) {
    cudaFuncAttributes attributes{};
    throw_on_cuda_error(cudaFuncGetAttributes(&attributes, kernel_entry<Kernel>), "a kernel's version");
    waits = attributes.ptxVersion >= kFirstVersion;
    known_device = device;
  }
  return waits;
}

/// Enqueues a kernel on `stream` (a cudaStream_t). Does nothing for an empty grid. Throws StepError.
template <typename Kernel>
void launch(const LaunchShape& shape, const typename Kernel::Parameters& parameters, void* stream) {
  if (shape.x == 0 || shape.y == 0 || shape.z == 0) return;
  if (shape.shared_bytes > kDefaultSharedBytes) {
    throw_on_cuda_error(
        cudaFuncSetAttribute(kernel_entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shape.shared_bytes)),
        "a kernel's shared memory");
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.x, shape.y, shape.z);
  config.blockDim = dim3(Kernel::kThreads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = shape.overlaps_previous && waits_for_previous_kernel<Kernel>() ? 1 : 0;
  throw_on_cuda_error(cudaLaunchKernelEx(&config, kernel_entry<Kernel>, parameters),
                      "the launch of a kernel");
}

#else

template <typename Kernel>
void launch(const LaunchShape& shape, const typename Kernel::Parameters& parameters, void* stream) {
  emulation::submit(stream, [shape, parameters] {
    emulation::run_grid({shape.x, shape.y, shape.z}, Kernel::kThreads, shape.shared_bytes,
                        [&parameters] { Kernel::run(parameters); });
  });
}

#endif

}  // namespace adaptrt::cuda
