#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/compressed_panels.h"

namespace adaptrt {

/// The upper bytes of bfloat16 elements: how often each occurs, and the table of the most frequent ones.
class UpperBytes {
 public:
  /// Code of an upper byte that is not in the table.
  static constexpr std::uint8_t kNoCode = kTableBytes;

  using Counts = std::array<std::int64_t, 256>;

  UpperBytes(const std::byte* elements, std::int64_t count);
  /// `counts`: how often each upper byte occurs.
  explicit UpperBytes(const Counts& counts);
  /// Adds the upper bytes of `count` elements.
  static void count(const std::byte* elements, std::int64_t count, Counts* counts);

  /// The most frequent upper bytes; equally frequent ones in ascending order.
  [[nodiscard]] const std::array<std::uint8_t, kTableBytes>& table() const { return table_; }
  /// Number of elements whose upper byte is not in the table.
  [[nodiscard]] std::int64_t num_outliers() const { return num_outliers_; }
  /// Index of an element's upper byte in the table, or kNoCode.
  [[nodiscard]] std::uint8_t code(std::uint16_t bits) const { return codes_[bits >> 8U]; }

 private:
  std::array<std::uint8_t, kTableBytes> table_{};
  std::array<std::uint8_t, std::tuple_size_v<Counts>> codes_{};
  std::int64_t num_outliers_ = 0;
};

}  // namespace adaptrt
