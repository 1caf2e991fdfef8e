#include "adaptrt/core/dtype.h"

#include <array>
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
