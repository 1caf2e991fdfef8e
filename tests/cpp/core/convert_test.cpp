#include "adaptrt/core/convert.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace adaptrt::convert_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float next(float value, float towards) {
  return std::nextafter(value, towards);
}

BOOST_AUTO_TEST_SUITE(convert)

BOOST_AUTO_TEST_CASE(halves_have_the_standard_s_values) {
  for (std::uint32_t bits = 0; bits < 0x8000U; ++bits) {
    const auto exponent = static_cast<int>(bits >> 10);
    const auto mantissa = static_cast<float>(bits & 0x3ffU);
    const float wide = float16_to_float(static_cast<std::uint16_t>(bits));
    const float negative = float16_to_float(static_cast<std::uint16_t>(bits | 0x8000U));
    BOOST_TEST(std::signbit(negative));
    if (exponent == 31) {
      BOOST_TEST((mantissa == 0 ? wide == kInfinity : std::isnan(wide)));
      continue;
    }
    const float expected =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0F + mantissa, exponent - 25);
    BOOST_TEST_REQUIRE(wide == expected);
    BOOST_TEST_REQUIRE(negative == -expected);
  }
}

BOOST_AUTO_TEST_CASE(floats_round_to_the_nearest_half_and_ties_to_even) {
  for (std::uint32_t bits = 0; bits < 0x7bffU; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const float middle = (float16_to_float(low) + float16_to_float(high)) / 2;  // exact
    const std::uint16_t even = (bits & 1U) == 0 ? low : high;
    BOOST_TEST_REQUIRE(float_to_float16(float16_to_float(low)) == low);
    BOOST_TEST_REQUIRE(float_to_float16(next(middle, 0)) == low);
    BOOST_TEST_REQUIRE(float_to_float16(middle) == even);
    BOOST_TEST_REQUIRE(float_to_float16(next(middle, kInfinity)) == high);
    BOOST_TEST_REQUIRE(float_to_float16(-middle) == (even | 0x8000U));
  }
  BOOST_TEST(float_to_float16(65519.0F) == 0x7bff);
  BOOST_TEST(float_to_float16(65520.0F) == 0x7c00);
  BOOST_TEST(float_to_float16(kInfinity) == 0x7c00);
  BOOST_TEST(float_to_float16(-std::numeric_limits<float>::max()) == 0xfc00);
  BOOST_TEST(std::isnan(float16_to_float(float_to_float16(std::numeric_limits<float>::quiet_NaN()))));
}

BOOST_AUTO_TEST_CASE(floats_round_to_the_nearest_bfloat16_and_ties_to_even) {
  BOOST_TEST(float_to_bfloat16(1.00390625F) == 0x3f80);  // half way between 1 and the next bfloat16
  BOOST_TEST(float_to_bfloat16(1.01171875F) == 0x3f82);
  BOOST_TEST(float_to_bfloat16(next(1.00390625F, kInfinity)) == 0x3f81);
  BOOST_TEST(float_to_bfloat16(std::numeric_limits<float>::max()) == 0x7f80);
  BOOST_TEST(std::isnan(bfloat16_to_float(float_to_bfloat16(std::numeric_limits<float>::quiet_NaN()))));
}

// Arrays of halves are rounded without floats, in blocks; `others` of a block's 64 are the tested half too.
BOOST_DATA_TEST_CASE(every_half_rounds_to_bfloat16, boost::unit_test::data::make({1, 8, 9, 64}), others) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    std::vector<std::uint16_t> source(66, 0x3c00);
    std::fill_n(source.begin(), others, half);
    source.back() = half;
    std::vector<std::uint16_t> out(source.size());
    convert_elements(reinterpret_cast<std::byte*>(out.data()), DType::kBFloat16,
                     reinterpret_cast<const std::byte*>(source.data()), DType::kFloat16, source.size());
    const std::uint16_t expected = float_to_bfloat16(float16_to_float(half));
    bool is_right = out.back() == expected;
    for (std::size_t i = 0; i < 65; ++i) {
      is_right &= out[i] == (i < static_cast<std::size_t>(others) ? expected : 0x3f80);
    }
    BOOST_TEST_REQUIRE(is_right, "half " << bits);
  }
}

BOOST_DATA_TEST_CASE(arrays_convert_as_single_elements_do,
                     boost::unit_test::data::make({0, 1, 2}) * boost::unit_test::data::make({0, 1, 2}),
                     from_type, to_type) {
  const DType from = kDTypes[from_type];
  const DType to = kDTypes[to_type];
  std::mt19937 random(5);
  for (std::size_t count = 0; count < 70; ++count) {
    // Arbitrary bits at unaligned addresses.
    std::vector<std::byte> source(1 + count * size_of(from));
    for (std::byte& byte : source) byte = static_cast<std::byte>(random());
    std::vector<std::byte> out(1 + count * size_of(to) + 1, std::byte{0x5a});
    std::vector<std::byte> expected = out;
    convert_elements(out.data() + 1, to, source.data() + 1, from, count);
    for (std::size_t i = 0; i < count; ++i) {
      if (from == to) {
        std::memcpy(expected.data() + 1 + i * size_of(to), source.data() + 1 + i * size_of(to), size_of(to));
      } else {
        store_from_float(expected.data() + 1, to, i, load_as_float(source.data() + 1, from, i));
      }
    }
    BOOST_TEST((out == expected));
  }
}

BOOST_DATA_TEST_CASE(arrays_are_scaled_in_float32,
                     boost::unit_test::data::make({0, 1, 2}) * boost::unit_test::data::make({0, 1, 2}),
                     from_type, to_type) {
  constexpr float kScale = 0.7F;
  const DType from = kDTypes[from_type];
  const DType to = kDTypes[to_type];
  std::mt19937 random(6);
  std::uniform_real_distribution<float> values(-3.0F, 3.0F);
  for (std::size_t count = 0; count < 70; ++count) {
    std::vector<std::byte> source(1 + count * size_of(from));
    for (std::size_t i = 0; i < count; ++i) store_from_float(source.data() + 1, from, i, values(random));
    std::vector<std::byte> out(1 + count * size_of(to) + 1, std::byte{0x5a});
    std::vector<std::byte> expected = out;
    scale_elements(out.data() + 1, to, source.data() + 1, from, kScale, count);
    for (std::size_t i = 0; i < count; ++i) {
      store_from_float(expected.data() + 1, to, i, load_as_float(source.data() + 1, from, i) * kScale);
    }
    BOOST_TEST((out == expected));
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::convert_test
