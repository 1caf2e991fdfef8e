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
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

/// Widens an IEEE half, given as its bits. Exact.
[[nodiscard]] float float16_to_float(std::uint16_t bits);

/// Rounds to an IEEE half, to nearest and ties to even; overflow gives infinity, NaN stays NaN.
[[nodiscard]] std::uint16_t float_to_float16(float value);

/// Reads element `index` of an array of `dtype` that starts at `data` (any alignment).
[[nodiscard]] float load_as_float(const std::byte* data, DType dtype, std::size_t index);

/// Writes element `index` of an array of `dtype` that starts at `data` (any alignment), rounding to nearest
/// even.
void store_from_float(std::byte* data, DType dtype, std::size_t index, float value);

}  // namespace adaptrt
