#pragma once

#include <cstdint>

#include "plugins/kernels/product.h"

namespace adaptrt::cuda::product {

/// Launches the kernel for compute capability 9.0. Arguments are as ProductKernel::enqueue has checked them.
/// Throws StepError when CUDA refuses.
void enqueue_on_hopper(const ProductKernel::Config& config, std::int64_t tokens,
                       const ProductKernel::Inputs& inputs, void* y, int multiprocessors, void* stream);

}  // namespace adaptrt::cuda::product
