#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/kernels/platform.h"

namespace adaptrt::cuda::product {

/// Part of y that a block of the Hopper kernel computes at a time.
struct Tile {
  int warpgroups;   ///< each has 64 outputs
  int tokens;       ///< columns of wgmma
  int steps;        ///< columns of `in` per stage, in units of 64
  int stages;       ///< buffers in shared memory
  int nanoseconds;  ///< time for 64 columns of `in` on an H200, as fitted to measurements

  [[nodiscard]] __host__ __device__ constexpr int outputs() const { return 64 * warpgroups; }
};

/// Tiles with at most 64 tokens have as many stages as fit in shared memory, because loading the weights
/// limits their speed.
inline constexpr std::array<Tile, 10> kTiles{{
    {.warpgroups = 1, .tokens = 8, .steps = 4, .stages = 5, .nanoseconds = 85},
    {.warpgroups = 1, .tokens = 16, .steps = 4, .stages = 5, .nanoseconds = 90},
    {.warpgroups = 1, .tokens = 32, .steps = 4, .stages = 4, .nanoseconds = 100},
    {.warpgroups = 1, .tokens = 64, .steps = 2, .stages = 6, .nanoseconds = 140},
    {.warpgroups = 2, .tokens = 64, .steps = 1, .stages = 8, .nanoseconds = 221},
    {.warpgroups = 1, .tokens = 128, .steps = 1, .stages = 8, .nanoseconds = 210},
    {.warpgroups = 3, .tokens = 64, .steps = 1, .stages = 6, .nanoseconds = 301},
    {.warpgroups = 2, .tokens = 128, .steps = 1, .stages = 6, .nanoseconds = 312},
    {.warpgroups = 3, .tokens = 128, .steps = 1, .stages = 4, .nanoseconds = 445},
    {.warpgroups = 2, .tokens = 256, .steps = 1, .stages = 4, .nanoseconds = 613},
}};

__host__ __device__ constexpr std::int64_t divide_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit;
}

/// Index in kTiles of the tile with the shortest estimated time. No bit of y depends on it.
constexpr std::size_t choose_tile(std::int64_t tokens, std::int64_t in_size, std::int64_t out_size,
                                  int multiprocessors) {
  constexpr double kBytesPerNanosecond = 4200;  // memory bandwidth of an H200
  constexpr int kFewTokens = 64;
  const double weights = 2.0 * static_cast<double>(in_size * out_size) / kBytesPerNanosecond;
  std::size_t best = kTiles.size();
  double shortest = 0;
  for (std::size_t i = 0; i < kTiles.size(); ++i) {
    const Tile& tile = kTiles[i];
    // Few tokens use the smallest tile that holds them.
    const bool holds = tile.tokens >= tokens;
    const bool larger = tile.tokens > 8 && tile.tokens >= 2 * tokens;
    if (tokens <= kFewTokens ? !holds || larger : tile.tokens < kFewTokens) continue;
    const std::int64_t blocks = divide_up(out_size, tile.outputs()) * divide_up(tokens, tile.tokens);
    const auto turns = static_cast<double>(divide_up(blocks, multiprocessors) * divide_up(in_size, 64));
    const double arithmetic = turns * tile.nanoseconds;
    // Even if loading the weights takes longer, less arithmetic still helps a little.
    const double time = std::max(arithmetic, weights) + arithmetic / 16;
    if (best == kTiles.size() || time < shortest) {
      best = i;
      shortest = time;
    }
  }
  return best;
}

/// Calls `take` with the tile's index as a compile-time constant.
template <typename Take, std::size_t... kIndices>
void with_tile(std::size_t tile, const Take& take, std::index_sequence<kIndices...> /*indices*/) {
  ((tile == kIndices ? take(std::integral_constant<std::size_t, kIndices>{}) : void()), ...);
}

}  // namespace adaptrt::cuda::product
