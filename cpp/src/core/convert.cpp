#include "adaptrt/core/convert.h"

#include <cstdint>
#include <cstring>

namespace adaptrt {
namespace {

float widen(float value, DType /*from*/) {
  return value;
}
float widen(std::uint16_t bits, DType from) {
  return from == DType::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

void round_to(float& out, DType /*to*/, float value) {
  out = value;
}
void round_to(std::uint16_t& out, DType to, float value) {
  out = to == DType::kBFloat16 ? float_to_bfloat16(value) : float_to_float16(value);
}

/// Operation of a loop on each element, between widening and rounding.
struct AsItIs {
  float operator()(float value) const { return value; }
};
struct Scaled {
  float scale;
  float operator()(float value) const { return value * scale; }
};

/// The types are template arguments so that the compiler vectorises the loop.
template <DType kTo, class To, DType kFrom, class From, class Change>
void convert_loop(std::byte* out, const std::byte* source, std::size_t count, Change change) {
  for (std::size_t i = 0; i < count; ++i) {
    From wide;
    std::memcpy(&wide, source + i * sizeof(From), sizeof(From));
    To narrow;
    round_to(narrow, kTo, change(widen(wide, kFrom)));
    std::memcpy(out + i * sizeof(To), &narrow, sizeof(To));
  }
}

template <DType kTo, class To, class Change>
void convert_from(std::byte* out, const std::byte* source, DType from, std::size_t count, Change change) {
  switch (from) {
    case DType::kFloat32:
      return convert_loop<kTo, To, DType::kFloat32, float>(out, source, count, change);
    case DType::kFloat16:
      return convert_loop<kTo, To, DType::kFloat16, std::uint16_t>(out, source, count, change);
    case DType::kBFloat16:
      return convert_loop<kTo, To, DType::kBFloat16, std::uint16_t>(out, source, count, change);
  }
}

template <class Change>
void convert(std::byte* out, DType to, const std::byte* source, DType from, std::size_t count,
             Change change) {
  switch (to) {
    case DType::kFloat32:
      return convert_from<DType::kFloat32, float>(out, source, from, count, change);
    case DType::kFloat16:
      return convert_from<DType::kFloat16, std::uint16_t>(out, source, from, count, change);
    case DType::kBFloat16:
      return convert_from<DType::kBFloat16, std::uint16_t>(out, source, from, count, change);
  }
}

}  // namespace

void convert_elements(std::byte* out, DType to, const std::byte* source, DType from, std::size_t count) {
  if (count == 0) return;
  if (to == from) {
    std::memcpy(out, source, count * size_of(to));
  } else {
    convert(out, to, source, from, count, AsItIs{});
  }
}

void scale_elements(std::byte* out, DType to, const std::byte* source, DType from, float scale,
                    std::size_t count) {
  convert(out, to, source, from, count, Scaled{scale});
}

}  // namespace adaptrt
