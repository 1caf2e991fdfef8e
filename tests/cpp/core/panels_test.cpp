#include "adaptrt/core/panels.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <vector>

#include "adaptrt/core/convert.h"

namespace adaptrt::panels_test {
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

BOOST_DATA_TEST_CASE(rows_may_lie_apart_and_be_of_another_type,
                     boost::unit_test::data::make(kSizes) *
                         boost::unit_test::data::make({1, 7, 8, 33, 1027}) *
                         boost::unit_test::data::make({0, 1, 2}) * boost::unit_test::data::make({0, 1, 2}),
                     n, k, dtype_index, source_index) {
  const DType dtype = kDTypes[dtype_index];
  const DType source_dtype = kDTypes[source_index];
  const std::int64_t stride = k + 5;
  std::vector<std::byte> source(static_cast<std::size_t>(n * stride) * size_of(source_dtype),
                                std::byte{0xff});
  const auto value = [&](std::int64_t r, std::int64_t c) {
    return static_cast<float>((r * k + c) % 201 - 100);
  };
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = 0; c < k; ++c) {
      store_from_float(source.data(), source_dtype, static_cast<std::size_t>(r * stride + c), value(r, c));
    }
  }
  std::vector<std::byte> panels(panel_bytes(dtype, n, k), std::byte{0xff});
  // Split at rows where no group of rows ends.
  for (std::int64_t first = 0; first < n; first += 37) {
    const std::size_t at = static_cast<std::size_t>(first * stride) * size_of(source_dtype);
    pack_panels(panels.data(), dtype, n, k, first, std::min<std::int64_t>(37, n - first), source.data() + at,
                source_dtype, stride);
  }
  std::vector<float> row(static_cast<std::size_t>(k));
  for (std::int64_t r = 0; r < n; ++r) {
    unpack_panel_row({panels.data(), dtype, n, k}, r, row.data());
    for (std::int64_t c = 0; c < k; ++c) BOOST_TEST(row[static_cast<std::size_t>(c)] == value(r, c));
  }
}

BOOST_DATA_TEST_CASE(padding_of_an_odd_k_is_zero,
                     boost::unit_test::data::make(kSizes) * boost::unit_test::data::make({1, 3, 7, 33}) *
                         boost::unit_test::data::make({0, 1, 2}),
                     n, k, dtype_index) {
  const DType dtype = kDTypes[dtype_index];
  const std::vector<float> weights(static_cast<std::size_t>(n * k), 1.0F);
  std::vector<std::byte> panels(panel_bytes(dtype, n, k), std::byte{0xff});
  pack_panels(panels.data(), dtype, n, k, 0, n, reinterpret_cast<const std::byte*>(weights.data()),
              DType::kFloat32, k);
  const std::size_t count = panels.size() / size_of(dtype);
  std::size_t ones = 0;
  std::size_t zeros = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float element = load_as_float(panels.data(), dtype, i);
    ones += element == 1.0F ? 1 : 0;
    zeros += element == 0.0F ? 1 : 0;
  }
  BOOST_TEST(ones == weights.size());
  BOOST_TEST(zeros == count - weights.size());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::panels_test
