#pragma once

#include "cuda/kernels/launch.h"

namespace adaptrt::cuda {

#ifdef __CUDACC__

/// An attribute of the current device. Throws StepError.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  throw_on_cuda_error(cudaGetDevice(&device), "the current device");
  throw_on_cuda_error(cudaDeviceGetAttribute(&value, attribute, device), "an attribute of the device");
  return value;
}

/// True if the current device has the instructions of hopper/. Throws StepError.
inline bool has_hopper_instructions() {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

#else

/// The emulation has them.
inline bool has_hopper_instructions() {
  return true;
}

#endif

}  // namespace adaptrt::cuda
