#pragma once

#include <cstdint>

namespace adaptrt {

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

}  // namespace adaptrt
