#include "upper_bytes.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace adaptrt {
namespace {

UpperBytes::Counts counts_of(const std::byte* elements, std::int64_t count) {
  UpperBytes::Counts counts{};
  UpperBytes::count(elements, count, &counts);
  return counts;
}

}  // namespace

void UpperBytes::count(const std::byte* elements, std::int64_t count, Counts* counts) {
  // Neighbours often have the same upper byte; separate counters avoid waiting for the previous increment.
  std::array<Counts, 4> apart{};
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, elements + i * static_cast<std::int64_t>(sizeof(bits)), sizeof(bits));
    ++apart[static_cast<std::size_t>(i % 4)][bits >> 8U];
  }
  for (std::size_t i = 0; i < counts->size(); ++i) {
    for (const Counts& part : apart) (*counts)[i] += part[i];
  }
}

UpperBytes::UpperBytes(const std::byte* elements, std::int64_t count)
    : UpperBytes(counts_of(elements, count)) {}

UpperBytes::UpperBytes(const Counts& counts)
    : num_outliers_(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})) {
  std::array<std::uint8_t, std::tuple_size_v<Counts>> order;
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint8_t>(i);
  std::ranges::stable_sort(order, [&](std::uint8_t a, std::uint8_t b) { return counts[a] > counts[b]; });
  std::copy_n(order.begin(), kTableBytes, table_.begin());
  codes_.fill(kNoCode);
  for (std::size_t code = 0; code < table_.size(); ++code) {
    codes_[table_[code]] = static_cast<std::uint8_t>(code);
    num_outliers_ -= counts[table_[code]];
  }
}

}  // namespace adaptrt
