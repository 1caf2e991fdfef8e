#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace adaptrt {

/// Computes a checksum at memory speed. It detects damage, not deliberate changes. Contents that differ in
/// only one aligned group of eight bytes always have different checksums; any other two contents collide with
/// a probability of 2^-64. The result depends on the machine's byte order.
[[nodiscard]] std::uint64_t checksum_of(std::span<const std::byte> bytes);

}  // namespace adaptrt
