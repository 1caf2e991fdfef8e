#pragma once

#include <cstdint>

namespace adaptrt::cuda {

/// Threads per warp.
inline constexpr int kWarpSize = 32;
/// Mask for collective calls by all threads of a warp.
inline constexpr std::uint32_t kAllLanes = 0xffffffffU;

}  // namespace adaptrt::cuda
