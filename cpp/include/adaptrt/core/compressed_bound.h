#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace adaptrt {

/// A bound of the bytes of compressed matrices (core/compressed_matrix.h) that have some of these bfloat16
/// elements: their own tables have at most as many outliers as one table for all elements.
class CompressedBound {
 public:
  void add(const std::byte* elements, std::int64_t count);
  /// Adds zeros, such as those that pad k.
  void add_zeros(std::int64_t count) { counts_[0] += count; }

  /// Enough bytes for a W[n, k], or for fewer outputs: those of the compressed form, or of the panels if
  /// these may be smaller.
  [[nodiscard]] std::size_t bytes(std::int64_t n, std::int64_t k) const;

 private:
  /// How often each upper byte occurs.
  std::array<std::int64_t, 256> counts_{};
};

}  // namespace adaptrt
