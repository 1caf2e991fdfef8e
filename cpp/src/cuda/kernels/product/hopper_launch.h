#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "adaptrt/cuda/product_kernel.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/hopper/tensor_map.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/product/hopper_kernel.h"
#include "cuda/kernels/product/tiles.h"

namespace adaptrt::cuda::product {

template <typename T, std::size_t kTile, typename Output>
void enqueue_tile(const ProductKernel::Config& config, int tokens, const ProductKernel::Inputs& inputs,
                  void* y, int multiprocessors, void* stream) {
  using Kernel = Hopper<T, kTile, Output>;
  constexpr Tile kShape = Kernel::kShape;
  const auto tiles = divide_up(config.out_size, kShape.outputs()) * divide_up(tokens, kShape.tokens);
  typename Kernel::Parameters parameters{
      .weights = map_of(config.dtype, inputs.weights, config.out_size, config.in_size, kShape.outputs()),
      .x = map_of(config.dtype, inputs.x, tokens, config.in_size, kShape.tokens),
      .y = {},
      .in = config.in_size,
      .out = config.out_size,
      .tokens = tokens};
  if constexpr (Kernel::kIsRounded) {
    parameters.y = map_of(config.dtype, y, tokens, config.out_size, Kernel::kStoredTokens);
  } else {
    parameters.y = static_cast<float*>(y);
  }
  launch<Kernel>({.x = static_cast<std::uint32_t>(std::min<std::int64_t>(tiles, multiprocessors)),
                  .shared_bytes = Kernel::kSharedBytes,
                  .overlaps_previous = true},
                 parameters, stream);
}

/// Launches the kernel with the best tile for a step. y has the type of x, or float32.
template <bool kFloat32Output>
void enqueue_best_tile(const ProductKernel::Config& config, std::int64_t tokens,
                       const ProductKernel::Inputs& inputs, void* y, int multiprocessors, void* stream) {
  constexpr std::size_t kCompiledTiles = kHasFewKernels ? 2 : kTiles.size();
  const std::size_t best = choose_tile(tokens, config.in_size, config.out_size, multiprocessors);
  if (best >= kCompiledTiles) {
    throw ConfigError(
        "this build does not have the tile of a product; build without ADAPTRT_CUDA_FEW_KERNELS");
  }
  with_tile(
      best,
      [&](auto tile) {
        with_element_type(config.dtype, [&]<typename T>(TypeTag<T>) {
          using Output = std::conditional_t<kFloat32Output, float, T>;
          enqueue_tile<T, tile, Output>(config, static_cast<int>(tokens), inputs, y, multiprocessors, stream);
        });
      },
      std::make_index_sequence<kCompiledTiles>{});
}

}  // namespace adaptrt::cuda::product
