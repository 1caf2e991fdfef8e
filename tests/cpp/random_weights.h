#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/panels.h"

namespace adaptrt::testing {

/// Converts a random byte to a valid byte of QuantizedRows::weights.
inline std::byte weight_byte(const Quantization& how, std::byte random) {
  if (how.code == WeightCode::kE4M3) {
    // If all bits except the sign are set, it is NaN.
    return (random & std::byte{0x7f}) == std::byte{0x7f} ? random ^ std::byte{1} : random;
  }
  if (!has_few_bits(how.algo)) return random == std::byte{0x80} ? std::byte{0x81} : random;
  if (how.bits == 4) return random;
  const unsigned mask = (1U << how.bits) - 1;
  const unsigned below = how.needs_group_sums() ? 0 : 1U << (how.bits - 1);
  const auto bits = static_cast<unsigned>(random);
  const unsigned even = ((bits & mask) - below) & 15U;
  const unsigned odd = ((bits >> 4 & mask) - below) & 15U;
  return static_cast<std::byte>(even | odd << 4);
}

}  // namespace adaptrt::testing
