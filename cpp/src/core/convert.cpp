#include "adaptrt/core/convert.h"

#include <cstdint>
#include <cstring>

namespace adaptrt {

void convert_elements(std::byte* out, DType to, const std::byte* source, DType from, std::size_t count) {
  if (to == from) {
    std::memcpy(out, source, count * size_of(to));
    return;
  }
  // The usual case, without a call for each element.
  if (from == DType::kFloat32 && to == DType::kBFloat16) {
    for (std::size_t i = 0; i < count; ++i) {
      float value = 0.0F;
      std::memcpy(&value, source + i * sizeof(value), sizeof(value));
      const std::uint16_t bits = float_to_bfloat16(value);
      std::memcpy(out + i * sizeof(bits), &bits, sizeof(bits));
    }
    return;
  }
  for (std::size_t i = 0; i < count; ++i) store_from_float(out, to, i, load_as_float(source, from, i));
}

}  // namespace adaptrt
