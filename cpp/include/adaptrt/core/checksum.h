#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace adaptrt {

/// A checksum at the speed of memory, for damage and not against intent. Bytes that differ within one of the
/// aligned groups of eight never have the same one; otherwise two contents have with a probability of 2^-64.
/// Depends on the byte order of the machine.
[[nodiscard]] std::uint64_t checksum_of(std::span<const std::byte> bytes);

}  // namespace adaptrt
