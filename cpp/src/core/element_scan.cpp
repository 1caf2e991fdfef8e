#include "adaptrt/core/element_scan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace adaptrt {
namespace {

/// Returns the index of the first element whose bits without the sign, as an unsigned number, are at least
/// `limit`. IEEE numbers have the order of their bits, with infinity and NaN last. Each block is tested
/// without branches, so that compilers vectorise the loop.
template <class Bits>
std::optional<std::size_t> find_magnitude_from(const std::byte* data, std::size_t count, Bits limit) {
  constexpr std::size_t kBlock = 1024;
  constexpr Bits kNoSign = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  Bits block[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t size = std::min(kBlock, count - start);
    std::memcpy(block, data + start * sizeof(Bits), size * sizeof(Bits));
    Bits largest = 0;
    for (std::size_t i = 0; i < size; ++i) {
      largest = std::max(largest, static_cast<Bits>(block[i] & kNoSign));
    }
    if (largest < limit) continue;
    const auto* found = std::find_if(block, block + size,
                                     [&](Bits bits) { return static_cast<Bits>(bits & kNoSign) >= limit; });
    return start + static_cast<std::size_t>(found - block);
  }
  return std::nullopt;
}

}  // namespace

std::uint32_t float32_limit(DType target) {
  // float16 rounds to infinity from 65520 on; bfloat16 from the midpoint between its largest value and 2^128.
  switch (target) {
    case DType::kFloat16:
      return 0x477ff000U;
    case DType::kBFloat16:
      return 0x7f7f8000U;
    case DType::kFloat32:
      break;
  }
  return 0x7f800000U;
}

std::optional<std::size_t> find_not_finite(const std::byte* data, DType dtype, std::size_t count,
                                           DType target) {
  switch (dtype) {
    case DType::kFloat32:
      return find_magnitude_from<std::uint32_t>(data, count, float32_limit(target));
    case DType::kFloat16:
      return find_magnitude_from<std::uint16_t>(data, count, 0x7c00U);
    case DType::kBFloat16:
      // 2^16 is the smallest bfloat16 that rounds to infinity in float16; the one below, 65280, is exact
      // there.
      return find_magnitude_from<std::uint16_t>(data, count, target == DType::kFloat16 ? 0x4780U : 0x7f80U);
  }
  return std::nullopt;
}

std::optional<std::size_t> find_not_zero(const std::byte* data, DType dtype, std::size_t count) {
  return dtype == DType::kFloat32 ? find_magnitude_from<std::uint32_t>(data, count, 1U)
                                  : find_magnitude_from<std::uint16_t>(data, count, 1U);
}

}  // namespace adaptrt
