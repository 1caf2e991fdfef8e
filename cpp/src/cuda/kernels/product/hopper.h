#pragma once

#include <cstdint>

#include "adaptrt/cuda/product_kernel.h"

namespace adaptrt::cuda::product {

/// Launches the kernel for compute capability 9.0. ProductKernel::enqueue must have checked the arguments.
/// Throws StepError if CUDA rejects the launch.
void enqueue_on_hopper(const ProductKernel::Config& config, std::int64_t tokens,
                       const ProductKernel::Inputs& inputs, void* y, int multiprocessors, void* stream);
/// The same, with float32 y.
void enqueue_float32_on_hopper(const ProductKernel::Config& config, std::int64_t tokens,
                               const ProductKernel::Inputs& inputs, void* y, int multiprocessors,
                               void* stream);

}  // namespace adaptrt::cuda::product
