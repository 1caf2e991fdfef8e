#include "adaptrt/core/dtype.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

namespace adaptrt {
namespace {

constexpr std::array<std::pair<DType, std::string_view>, 3> kNames{{
    {DType::kFloat32, "float32"},
    {DType::kFloat16, "float16"},
    {DType::kBFloat16, "bfloat16"},
}};

}  // namespace

std::string_view name_of(DType dtype) {
  for (const auto& [value, name] : kNames) {
    if (value == dtype) return name;
  }
  return "unknown";
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const auto& [value, known] : kNames) {
    if (known == name) return value;
  }
  return std::nullopt;
}

float float16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
}

std::uint16_t float_to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  // 65520 is half way between the largest half and the next power of two: from there on it rounds to
  // infinity.
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (magnitude < 0x38800000U) {
    // Subnormal halves are multiples of 2^-24; the rounding mode's nearbyint is to nearest even.
    const float scaled = std::ldexp(std::bit_cast<float>(magnitude), 24);
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::nearbyint(scaled)));
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

float load_as_float(const std::byte* data, DType dtype, std::size_t index) {
  if (dtype == DType::kFloat32) {
    float value = 0.0F;
    std::memcpy(&value, data + index * sizeof(value), sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data + index * sizeof(bits), sizeof(bits));
  return dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

void store_from_float(std::byte* data, DType dtype, std::size_t index, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(data + index * sizeof(value), &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = dtype == DType::kBFloat16 ? float_to_bfloat16(value) : float_to_float16(value);
  std::memcpy(data + index * sizeof(bits), &bits, sizeof(bits));
}

}  // namespace adaptrt
