#include "adaptrt/core/int8_matrix.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace adaptrt::int8_matrix_test {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr std::int64_t kOutputs[] = {1, 20, 64, 100, 192};
constexpr std::int64_t kInputs[] = {1, 2, 7, 16, 138};

/// W[n, k] of one type, as values and as panels.
struct Matrix {
  Matrix(DType type, std::int64_t outputs, std::int64_t inputs, std::mt19937* random)
      : dtype(type), n(outputs), k(inputs), panels(panel_bytes(type, outputs, inputs)) {
    std::normal_distribution<float> normal;
    values.resize(static_cast<std::size_t>(n * k));
    for (float& value : values) value = normal(*random);
    pack();
  }

  void pack() {
    pack_panels(panels.data(), dtype, n, k, 0, n, reinterpret_cast<const std::byte*>(values.data()),
                DType::kFloat32, k);
    for (std::int64_t row = 0; row < n; ++row) {
      unpack_panel_row({panels.data(), dtype, n, k}, row, values.data() + row * k);
    }
  }

  [[nodiscard]] std::vector<float> maxima(ScaleAxis axis) const {
    std::vector<float> found(static_cast<std::size_t>(axis == ScaleAxis::kOutputs ? n : k));
    raise_maxima(panels.data(), dtype, n, k, axis, found);
    return found;
  }

  DType dtype;
  std::int64_t n;
  std::int64_t k;
  std::vector<float> values;
  std::vector<std::byte> panels;
};

BOOST_AUTO_TEST_SUITE(int8_matrix)

BOOST_DATA_TEST_CASE(values_are_within_half_a_scale, boost::unit_test::data::xrange(3), type) {
  constexpr std::byte kUntouched{0xab};
  const std::uint32_t seed = std::random_device{}();
  BOOST_TEST_CONTEXT("seed " << seed) {
    std::mt19937 random(seed);
    for (const std::int64_t n : kOutputs) {
      for (const std::int64_t k : kInputs) {
        const Matrix matrix(kTypes[type], n, k, &random);
        for (const ScaleAxis axis : {ScaleAxis::kOutputs, ScaleAxis::kInputs}) {
          std::vector<float> scales = matrix.maxima(axis);
          std::vector<float> greatest(scales.size());
          for (std::int64_t i = 0; i < n * k; ++i) {
            float& of = greatest[static_cast<std::size_t>(axis == ScaleAxis::kOutputs ? i / k : i % k)];
            of = std::max(of, std::abs(matrix.values[static_cast<std::size_t>(i)]));
          }
          BOOST_TEST((scales == greatest));
          std::ranges::transform(scales, scales.begin(), int8_scale);
          std::vector<std::byte> rounded(int8_matrix_bytes(n, k) + 1, kUntouched);
          round_to_int8(matrix.panels.data(), matrix.dtype, n, k, axis, scales, rounded.data());
          BOOST_TEST((rounded.back() == kUntouched));
          std::vector<float> row(static_cast<std::size_t>(k));
          for (std::int64_t output = 0; output < n; ++output) {
            unpack_int8_row(rounded.data(), n, k, output, row.data());
            for (std::int64_t i = 0; i < k; ++i) {
              const double scale = scales[static_cast<std::size_t>(axis == ScaleAxis::kOutputs ? output : i)];
              const double value = matrix.values[static_cast<std::size_t>(output * k + i)];
              // The quotient is rounded to float32 first.
              constexpr double kBound = 0.5 + 127 * 0x1p-24;
              BOOST_TEST_REQUIRE(std::abs(row[static_cast<std::size_t>(i)] * scale - value) <=
                                 kBound * scale);
            }
          }
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(integers_have_the_layout_of_quantised_panels) {
  std::mt19937 random(1);
  constexpr std::int64_t kN = 70;
  constexpr std::int64_t kK = 7;
  const Matrix matrix(DType::kFloat32, kN, kK, &random);
  const std::vector<float> scales(kN, 0.05F);
  std::vector<std::byte> rounded(int8_matrix_bytes(kN, kK));
  round_to_int8(matrix.panels.data(), matrix.dtype, kN, kK, ScaleAxis::kOutputs, scales, rounded.data());
  for (std::int64_t panel = 0; panel < panel_count(kN); ++panel) {
    const std::int64_t width = panel_width(kN, panel);
    // A panel with scales, of which only the weights are read.
    std::vector<std::byte> quantised(panel_bytes(kInt8Matrix, matrix.dtype, width, kK));
    const std::byte* from = rounded.data() + int8_matrix_offset(kK, panel);
    std::copy_n(from, int8_matrix_bytes(width, kK), quantised.begin());
    auto* of_panel = reinterpret_cast<float*>(quantised.data() + int8_matrix_bytes(width, kK));
    std::fill_n(of_panel, width, 1.0F);
    std::vector<float> expected(kK);
    std::vector<float> found(kK);
    for (std::int64_t row = 0; row < width; ++row) {
      unpack_panel_row({quantised.data(), matrix.dtype, width, kK, nullptr, kInt8Matrix}, row,
                       expected.data());
      unpack_int8_row(rounded.data(), kN, kK, panel * kPanelColumns + row, found.data());
      BOOST_TEST((found == expected));
    }
  }
}

BOOST_AUTO_TEST_CASE(halves_go_to_the_even_integer_and_tiny_values_to_zero) {
  std::mt19937 random(1);
  Matrix matrix(DType::kFloat32, 1, 8, &random);
  matrix.values = {0.5F, 1.5F, 2.5F, -0.5F, -1.5F, 126.5F, 1000.0F, -1000.0F};
  matrix.pack();
  std::vector<std::byte> rounded(int8_matrix_bytes(1, 8));
  std::vector<float> row(8);
  const auto round = [&](float scale) {
    round_to_int8(matrix.panels.data(), matrix.dtype, 1, 8, ScaleAxis::kOutputs, std::vector{scale},
                  rounded.data());
    unpack_int8_row(rounded.data(), 1, 8, 0, row.data());
    return row;
  };
  BOOST_TEST((round(1.0F) == std::vector<float>{0, 2, 2, 0, -2, 126, 127, -127}));
  BOOST_TEST((round(0.0F) == std::vector<float>(8)));
  BOOST_TEST(int8_scale(127.0F) == 1.0F);
  BOOST_TEST(int8_scale(0x1p-100F) > 0.0F);
  BOOST_TEST(int8_scale(0x1.fp-101F) == 0.0F);
}

/// An adapter is rounded before it is refused for such values.
BOOST_AUTO_TEST_CASE(numbers_that_are_not_finite_are_no_undefined_conversion) {
  std::mt19937 random(1);
  Matrix matrix(DType::kFloat32, 1, 3, &random);
  matrix.values = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1.0F};
  matrix.pack();
  BOOST_TEST(matrix.maxima(ScaleAxis::kOutputs)[0] == std::numeric_limits<float>::infinity());
  BOOST_TEST(matrix.maxima(ScaleAxis::kInputs)[0] == 0.0F);
  std::vector<std::byte> rounded(int8_matrix_bytes(1, 3));
  std::vector<float> row(3);
  round_to_int8(matrix.panels.data(), matrix.dtype, 1, 3, ScaleAxis::kOutputs, std::vector{1.0F},
                rounded.data());
  unpack_int8_row(rounded.data(), 1, 3, 0, row.data());
  for (const float value : row) BOOST_TEST(std::abs(value) <= 127.0F);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::int8_matrix_test
