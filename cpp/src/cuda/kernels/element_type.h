#pragma once

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

template <typename T>
struct TypeTag {
  using Type = T;
};

/// True in a build that only checks that nvcc compiles the sources: it has the kernels for bfloat16, one
/// head_dim and a few tiles of products (CMake's ADAPTRT_CUDA_FEW_KERNELS).
#ifdef ADAPTRT_CUDA_FEW_KERNELS
inline constexpr bool kHasFewKernels = true;
#else
inline constexpr bool kHasFewKernels = false;
#endif

/// Calls function(TypeTag<T>) with the element type of a dtype, float16 or bfloat16. Throws ConfigError if
/// the build does not have its kernels.
template <typename Function>
void with_element_type(DType dtype, const Function& function) {
  if (dtype == DType::kBFloat16) {
    function(TypeTag<BFloat16>{});
  } else if constexpr (kHasFewKernels) {
    throw ConfigError("this build has no kernels for float16; build without ADAPTRT_CUDA_FEW_KERNELS");
  } else {
    function(TypeTag<Half>{});
  }
}

}  // namespace adaptrt::cuda
