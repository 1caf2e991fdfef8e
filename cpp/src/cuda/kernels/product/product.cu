#include <cstdint>
#include <limits>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/product_kernel.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/hopper/device.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/product/launch_checks.h"
#include "cuda/kernels/product/portable_kernel.h"
#include "cuda/kernels/product/tiles.h"
#ifdef __CUDACC__
#include "cuda/kernels/product/hopper.h"
#endif

namespace adaptrt::cuda {
namespace {

using product::divide_up;
using product::Portable;

template <typename T, typename Output>
void enqueue_portable(const ProductKernel::Config& config, std::int64_t tokens,
                      const ProductKernel::Inputs& inputs, void* y, void* stream) {
  using Kernel = Portable<T, Output>;
  launch<Kernel>({.x = static_cast<std::uint32_t>(divide_up(config.out_size, Kernel::kOutputs)),
                  .y = static_cast<std::uint32_t>(divide_up(tokens, Kernel::kTokens)),
                  .shared_bytes = Kernel::kSharedBytes,
                  .overlaps_previous = true},
                 {.x = inputs.x,
                  .weights = inputs.weights,
                  .y = y,
                  .in = config.in_size,
                  .out = config.out_size,
                  .tokens = static_cast<int>(tokens)},
                 stream);
}

}  // namespace

ProductKernel::ProductKernel(Config config) : config_(config) {
  Problems problems;
  if (config.dtype == DType::kFloat32) problems.add("dtype is float32; expected float16 or bfloat16");
  for (const auto& [name, size] : {std::pair{"in_size", config.in_size}, {"out_size", config.out_size}}) {
    if (size < 8 || size % 8 != 0) {
      problems.add(std::string(name) + " is " + std::to_string(size) + "; expected a positive multiple of 8");
    }
  }
  problems.throw_if_any<ConfigError>("ProductKernel");
}

void ProductKernel::enqueue(std::int64_t tokens, const Inputs& inputs, void* y, void* stream) const {
  constexpr std::int64_t kMaxTokens = product::kMaxTokenTiles * Portable<BFloat16>::kTokens;
  product::check_launch("ProductKernel", tokens, kMaxTokens, inputs.x, inputs.weights, y);
  if (tokens == 0) return;
#ifdef __CUDACC__
  if (!config_.portable && has_hopper_instructions()) {
    const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
    const auto enqueue_kernel =
        config_.float32_output ? product::enqueue_float32_on_hopper : product::enqueue_on_hopper;
    enqueue_kernel(config_, tokens, inputs, y, multiprocessors, stream);
    return;
  }
#endif
  with_element_type(config_.dtype, [&]<typename T>(TypeTag<T>) {
    if (config_.float32_output) {
      enqueue_portable<T, float>(config_, tokens, inputs, y, stream);
    } else {
      enqueue_portable<T, T>(config_, tokens, inputs, y, stream);
    }
  });
}

}  // namespace adaptrt::cuda
