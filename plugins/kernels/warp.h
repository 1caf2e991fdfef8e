#pragma once

#include <cstdint>

namespace adaptrt::cuda {

/// Threads of a warp.
inline constexpr int kWarpSize = 32;
/// The mask of a warp's collective calls that all its threads make.
inline constexpr std::uint32_t kAllLanes = 0xffffffffU;

}  // namespace adaptrt::cuda
