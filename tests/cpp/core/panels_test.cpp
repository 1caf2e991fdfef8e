#include "adaptrt/core/panels.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <vector>

namespace adaptrt {
namespace {

constexpr std::int64_t kSizes[] = {1, 2, 63, 64, 65, 130};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

BOOST_AUTO_TEST_SUITE(panels)

BOOST_DATA_TEST_CASE(unpacking_gives_back_what_was_packed,
                     boost::unit_test::data::make(kSizes) * boost::unit_test::data::make(kSizes) *
                         boost::unit_test::data::make({0, 1, 2}),
                     n, k, dtype_index) {
  const DType dtype = kDTypes[dtype_index];
  std::vector<float> weights(static_cast<std::size_t>(n * k));
  // Small integers are exact in every type.
  for (std::size_t i = 0; i < weights.size(); ++i)
    weights[i] = static_cast<float>(static_cast<int>(i % 201) - 100);
  std::vector<std::byte> panels(panel_bytes(dtype, n, k), std::byte{0xff});
  const auto* source = reinterpret_cast<const std::byte*>(weights.data());
  const std::int64_t half = n / 2;
  pack_panels(panels.data(), dtype, n, k, 0, half, source, DType::kFloat32, k);
  pack_panels(panels.data(), dtype, n, k, half, n - half, source + half * k * 4, DType::kFloat32, k);
  std::vector<float> row(static_cast<std::size_t>(k));
  for (std::int64_t r = 0; r < n; ++r) {
    unpack_panel_row({panels.data(), dtype, n, k}, r, row.data());
    for (std::int64_t c = 0; c < k; ++c) BOOST_TEST(row[c] == weights[r * k + c]);
  }
}

BOOST_AUTO_TEST_CASE(halves_round_trip_through_float) {
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide = float16_to_float(half);
    if (std::isnan(wide)) continue;
    BOOST_TEST(float_to_float16(wide) == half);
  }
}

BOOST_AUTO_TEST_CASE(conversions_round_to_nearest_even) {
  BOOST_TEST(float_to_bfloat16(1.00390625F) == 0x3f80);  // half way between 1 and the next: to even
  BOOST_TEST(float_to_bfloat16(1.01171875F) == 0x3f82);
  BOOST_TEST(float_to_float16(65519.0F) == 0x7bff);
  BOOST_TEST(float_to_float16(65520.0F) == 0x7c00);
  BOOST_TEST(float_to_float16(std::ldexp(1.0F, -25)) == 0x0000);
  BOOST_TEST(float_to_float16(std::ldexp(3.0F, -25)) == 0x0002);
  BOOST_TEST(std::isnan(bfloat16_to_float(float_to_bfloat16(std::numeric_limits<float>::quiet_NaN()))));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt
