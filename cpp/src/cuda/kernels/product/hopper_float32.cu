#include "cuda/kernels/product/hopper.h"
#include "cuda/kernels/product/hopper_launch.h"

namespace adaptrt::cuda::product {

void enqueue_float32_on_hopper(const ProductKernel::Config& config, std::int64_t tokens,
                               const ProductKernel::Inputs& inputs, void* y, int multiprocessors,
                               void* stream) {
  enqueue_best_tile<true>(config, tokens, inputs, y, multiprocessors, stream);
}

}  // namespace adaptrt::cuda::product
