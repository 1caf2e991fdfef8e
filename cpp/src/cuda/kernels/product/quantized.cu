#include <cstdint>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/quantized_product_kernel.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/product/launch_checks.h"
#include "cuda/kernels/product/quantized_kernel.h"
#include "cuda/kernels/product/tiles.h"

namespace adaptrt::cuda {
namespace {

using product::divide_up;
using product::Quantized;

/// Columns of one matrix instruction.
constexpr std::int32_t kStep = 16;

template <typename T, int kBits, typename Output>
void launch_product(const QuantizedProductKernel::Config& config, std::int64_t tokens,
                    const QuantizedProductKernel::Inputs& inputs, void* y, void* stream) {
  using Kernel = Quantized<T, kBits, Output>;
  const std::int32_t group_size = config.group_size == 0 ? config.in_size : config.group_size;
  launch<Kernel>({.x = static_cast<std::uint32_t>(divide_up(config.out_size, Kernel::kOutputs)),
                  .y = static_cast<std::uint32_t>(divide_up(tokens, Kernel::kTokens)),
                  .shared_bytes = Kernel::kSharedBytes,
                  .overlaps_previous = true},
                 {.x = inputs.x,
                  .weights = inputs.weights,
                  .scales = inputs.scales,
                  .zeros = inputs.zeros,
                  .y = y,
                  .in = config.in_size,
                  .out = config.out_size,
                  .tokens = static_cast<int>(tokens),
                  .groups = config.groups(),
                  .group_steps = group_size / kStep},
                 stream);
}

template <typename T, int kBits>
void launch_output(const QuantizedProductKernel::Config& config, std::int64_t tokens,
                   const QuantizedProductKernel::Inputs& inputs, void* y, void* stream) {
  if (config.float32_output) {
    launch_product<T, kBits, float>(config, tokens, inputs, y, stream);
  } else {
    launch_product<T, kBits, T>(config, tokens, inputs, y, stream);
  }
}

}  // namespace

QuantizedProductKernel::QuantizedProductKernel(Config config) : config_(config) {
  Problems problems;
  if (config.dtype == DType::kFloat32) problems.add("dtype is float32; expected float16 or bfloat16");
  if (config.bits != 8 && config.bits != 4) {
    problems.add("bits is " + std::to_string(config.bits) + "; expected 8 or 4");
  }
  const auto check_size = [&](const char* name, std::int32_t size, std::int32_t least, std::int32_t unit) {
    if (size >= least && size % unit == 0) return;
    problems.add(std::string(name) + " is " + std::to_string(size) + "; expected a multiple of " +
                 std::to_string(unit) + " from " + std::to_string(least) + " on");
  };
  const std::int32_t together = config.bits == 4 ? 2 * kStep : kStep;
  check_size("in_size", config.in_size, together, together);
  check_size("out_size", config.out_size, 8, 8);
  check_size("group_size", config.group_size, 0, kStep);
  problems.throw_if_any<ConfigError>("QuantizedProductKernel");
}

void QuantizedProductKernel::enqueue(std::int64_t tokens, const Inputs& inputs, void* y, void* stream) const {
  constexpr std::int64_t kMaxTokens = product::kMaxTokenTiles * Quantized<BFloat16, 8>::kTokens;
  product::check_launch("QuantizedProductKernel", tokens, kMaxTokens, inputs.x, inputs.weights, y);
  if (tokens == 0) return;
  with_element_type(config_.dtype, [&]<typename T>(TypeTag<T>) {
    if (config_.bits == 8) {
      launch_output<T, 8>(config_, tokens, inputs, y, stream);
    } else {
      launch_output<T, 4>(config_, tokens, inputs, y, stream);
    }
  });
}

}  // namespace adaptrt::cuda
