#pragma once

#include <cstdint>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt::cuda::product {

/// CUDA's maximum of a grid's y.
inline constexpr std::int64_t kMaxTokenTiles = 65535;

/// Checks what launches of all products need: the number of tokens, and addresses at multiples of 16 bytes.
/// Raises ConfigError with all problems, in the name of `kernel`.
inline void check_launch(const char* kernel, std::int64_t tokens, std::int64_t max_tokens, const void* x,
                         const void* weights, const void* y) {
  constexpr std::uintptr_t kAlignment = 16;
  Problems problems;
  if (tokens < 0 || tokens > max_tokens) {
    problems.add("tokens is " + std::to_string(tokens) + "; expected 0 to " + std::to_string(max_tokens));
  }
  for (const void* address : {x, weights, y}) {
    if (reinterpret_cast<std::uintptr_t>(address) % kAlignment == 0) continue;
    problems.add("an address is not aligned; expected x, weights and y at multiples of 16");
    break;
  }
  problems.throw_if_any<ConfigError>(kernel);
}

}  // namespace adaptrt::cuda::product
