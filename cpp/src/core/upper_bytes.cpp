#include "upper_bytes.h"

#include <algorithm>
#include <cstring>

namespace adaptrt {
namespace {

constexpr std::size_t kBytes = 256;

using Counts = std::array<std::int64_t, kBytes>;

Counts count_upper_bytes(const std::byte* elements, std::int64_t count) {
  // Neighbours often have the same upper byte; separate counters avoid waiting for the previous increment.
  std::array<Counts, 4> apart{};
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, elements + i * static_cast<std::int64_t>(sizeof(bits)), sizeof(bits));
    ++apart[static_cast<std::size_t>(i % 4)][bits >> 8U];
  }
  Counts counts{};
  for (std::size_t i = 0; i < kBytes; ++i) {
    for (const Counts& part : apart) counts[i] += part[i];
  }
  return counts;
}

}  // namespace

UpperBytes::UpperBytes(const std::byte* elements, std::int64_t count) : num_outliers_(count) {
  const Counts counts = count_upper_bytes(elements, count);
  std::array<std::uint8_t, kBytes> order;
  for (std::size_t i = 0; i < kBytes; ++i) order[i] = static_cast<std::uint8_t>(i);
  std::ranges::stable_sort(order, [&](std::uint8_t a, std::uint8_t b) { return counts[a] > counts[b]; });
  std::copy_n(order.begin(), kTableBytes, table_.begin());
  codes_.fill(kNoCode);
  for (std::size_t code = 0; code < table_.size(); ++code) {
    codes_[table_[code]] = static_cast<std::uint8_t>(code);
    num_outliers_ -= counts[table_[code]];
  }
}

}  // namespace adaptrt
