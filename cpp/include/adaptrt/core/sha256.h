#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace adaptrt {

using Sha256Digest = std::array<std::byte, 32>;

/// SHA-256 (FIPS 180-4) of data that is added in pieces of any size.
class Sha256 {
 public:
  Sha256& add(std::span<const std::byte> bytes);
  Sha256& add(std::string_view text) { return add(std::as_bytes(std::span(text))); }
  template <std::integral Integer>
  Sha256& add(std::span<const Integer> values) {
    return add(std::as_bytes(values));
  }
  /// Adds eight bytes, the lowest first.
  Sha256& add_integer(std::uint64_t value);
  /// Returns the digest of all bytes that were added. Nothing may be added after this call.
  [[nodiscard]] Sha256Digest finish();

 private:
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> pending_{};
  std::size_t num_pending_ = 0;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace adaptrt
