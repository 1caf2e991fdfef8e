#include "adaptrt/core/checksum.h"

#include <array>
#include <bit>
#include <cstring>

namespace adaptrt {
namespace {

// Every step is invertible for a given word, so differences in a lane are never lost.
constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15ULL;  // must be odd, like kSecondFactor
constexpr std::uint64_t kSecondFactor = 0xd6e8feb86659fd93ULL;

std::uint64_t absorb(std::uint64_t lane, std::uint64_t word) {
  const std::uint64_t mixed = (lane ^ word) * kFactor;
  // After only one product, the next word could undo a change in the highest bits.
  return std::rotl((mixed ^ mixed >> 32) * kSecondFactor, 29);
}

}  // namespace

std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  // Lanes are independent, so multiplications do not wait for each other.
  std::array<std::uint64_t, 8> lanes{1, 2, 3, 4, 5, 6, 7, 8};
  constexpr std::size_t kStride = sizeof(lanes);
  std::array<std::uint64_t, 8> words{};
  const std::uint64_t size = bytes.size();
  for (; bytes.size() >= kStride; bytes = bytes.subspan(kStride)) {
    std::memcpy(words.data(), bytes.data(), kStride);
    for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = absorb(lanes[i], words[i]);
  }
  words = {};
  if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
  std::uint64_t sum = size * kFactor;
  for (std::size_t i = 0; i < lanes.size(); ++i) sum = absorb(sum, absorb(lanes[i], words[i]));
  return sum;
}

}  // namespace adaptrt
