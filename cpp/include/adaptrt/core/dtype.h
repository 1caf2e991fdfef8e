#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace adaptrt {

/// Element types of weights, adapters and the KV cache.
enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16 };

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

/// "float32", "float16" or "bfloat16".
[[nodiscard]] std::string_view name_of(DType dtype);

/// The inverse of name_of; nullopt for any other name.
[[nodiscard]] std::optional<DType> dtype_from_name(std::string_view name);

/// Widens a bfloat16, given as its bits.
[[nodiscard]] inline float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounds to bfloat16, to nearest and ties to even; NaN stays NaN.
[[nodiscard]] inline std::uint16_t float_to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40U;
  return static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? nan : rounded);
}

/// `condition` ? a : b without a branch: compilers branch around floating-point operations, and then do not
/// vectorise the loop.
[[nodiscard]] inline std::uint32_t choose(bool condition, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

/// Widens an IEEE half, given as its bits. Exact.
[[nodiscard]] inline float float16_to_float(std::uint16_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffU;
  // The exponent's bias is 15 in a half and 127 in a float; infinity and NaN have the largest in both.
  const std::uint32_t rebias = magnitude >= 0x7c00U ? 224U << 23 : 112U << 23;
  const std::uint32_t normal = (magnitude << 13) + rebias;
  // A subnormal half counts units of 2^-24, which is the last bit of floats from 0.5 to 1.
  const float subnormal = std::bit_cast<float>(magnitude | 0x3f000000U) - 0.5F;
  const std::uint32_t wide = choose(magnitude < 0x0400U, std::bit_cast<std::uint32_t>(subnormal), normal);
  return std::bit_cast<float>(wide | static_cast<std::uint32_t>(bits & 0x8000U) << 16);
}

/// Rounds to an IEEE half, to nearest and ties to even; overflow gives infinity, NaN stays NaN.
[[nodiscard]] inline std::uint16_t float_to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t normal = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  // Adding 0.5 rounds to a multiple of 2^-24, the unit of subnormal halves, in the sum's last bits.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U;
  std::uint32_t half = choose(magnitude < 0x38800000U, subnormal, normal);
  // 65520 is half way between the largest half and the next power of two.
  half = choose(magnitude >= 0x477ff000U, 0x7c00U, half);
  half = choose(magnitude > 0x7f800000U, 0x7e00U, half);
  return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000U));
}

/// Reads element `index` of an array of `dtype` that starts at `data` (any alignment).
[[nodiscard]] float load_as_float(const std::byte* data, DType dtype, std::size_t index);

/// Writes element `index` of an array of `dtype` that starts at `data` (any alignment), rounding to nearest
/// even.
void store_from_float(std::byte* data, DType dtype, std::size_t index, float value);

}  // namespace adaptrt
