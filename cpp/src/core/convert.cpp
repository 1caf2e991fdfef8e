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

/// Rounds a half, which is zero or a normal number, to bfloat16.
std::uint16_t half_to_bfloat16(std::uint16_t bits) {
  constexpr unsigned kRebias = 112U << 7U;  // the exponents' biases are 15 and 127
  const auto magnitude = static_cast<std::uint16_t>(bits & 0x7fffU);
  // bfloat16 has three bits less. It rounds to nearest and ties to even.
  const auto rounded = static_cast<std::uint16_t>((magnitude + 3U + (magnitude >> 3U & 1U)) >> 3U);
  const auto rebias = static_cast<std::uint16_t>(magnitude == 0U ? 0U : kRebias);
  return static_cast<std::uint16_t>((rounded + rebias) | (bits & 0x8000U));
}

/// True if a half is subnormal, infinite or NaN.
bool is_special_half(std::uint16_t bits) {
  const auto magnitude = static_cast<std::uint16_t>(bits & 0x7fffU);
  const auto turned = static_cast<std::uint16_t>((magnitude + 0x400U) & 0x7fffU);
  return static_cast<int>(turned < 0x800U) > static_cast<int>(magnitude == 0U);
}

/// Compilers vectorise loops over integers of 16 bits, with twice as many lanes as floats have. Special
/// halves, which are few, are converted one at a time.
void halves_to_bfloat16(std::byte* out, const std::byte* source, std::size_t count) {
  constexpr std::size_t kBlock = 64;
  constexpr unsigned kFew = 8;
  const auto convert_floats = [&](std::size_t begin, std::size_t size) {
    const std::size_t offset = begin * sizeof(std::uint16_t);
    convert(out + offset, DType::kBFloat16, source + offset, DType::kFloat16, size, AsItIs{});
  };
  std::uint16_t block[kBlock];
  std::uint16_t rounded[kBlock];
  std::size_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    std::memcpy(block, source + begin * sizeof(std::uint16_t), sizeof(block));
    std::uint16_t special = 0;
    for (const std::uint16_t bits : block) {
      special = static_cast<std::uint16_t>(special + (is_special_half(bits) ? 1U : 0U));
    }
    if (special > kFew) {
      convert_floats(begin, kBlock);
      continue;
    }
    for (std::size_t i = 0; i < kBlock; ++i) rounded[i] = half_to_bfloat16(block[i]);
    for (std::size_t i = 0; special > 0; ++i) {
      if (!is_special_half(block[i])) continue;
      rounded[i] = float_to_bfloat16(float16_to_float(block[i]));
      --special;
    }
    std::memcpy(out + begin * sizeof(std::uint16_t), rounded, sizeof(rounded));
  }
  convert_floats(begin, count - begin);
}

}  // namespace

void convert_elements(std::byte* out, DType to, const std::byte* source, DType from, std::size_t count) {
  if (count == 0) return;
  if (to == from) {
    std::memcpy(out, source, count * size_of(to));
  } else if (to == DType::kBFloat16 && from == DType::kFloat16) {
    halves_to_bfloat16(out, source, count);
  } else {
    convert(out, to, source, from, count, AsItIs{});
  }
}

void scale_elements(std::byte* out, DType to, const std::byte* source, DType from, float scale,
                    std::size_t count) {
  convert(out, to, source, from, count, Scaled{scale});
}

}  // namespace adaptrt
