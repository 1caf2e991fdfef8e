#pragma once

#include "adaptrt/core/dtype.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

template <typename T>
struct TypeTag {
  using Type = T;
};

/// Calls function(TypeTag<T>) with the element type of a dtype, float16 or bfloat16.
template <typename Function>
void with_element_type(DType dtype, const Function& function) {
  if (dtype == DType::kFloat16) {
    function(TypeTag<Half>{});
  } else {
    function(TypeTag<BFloat16>{});
  }
}

}  // namespace adaptrt::cuda
