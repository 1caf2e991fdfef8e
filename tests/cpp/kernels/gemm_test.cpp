#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <vector>

#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"
#include "support/sanitized.h"

namespace adaptrt::gemm_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
/// Unit roundoff of float32, in which all sums are computed.
constexpr double kRounding = 0x1p-24;

/// Activations and one panel of weights, with the float64 products of the stored values.
struct Case {
  Case(DType dtype, std::int64_t num_rows, std::int64_t depth, std::int64_t columns, FreshRandom* random)
      : rows(num_rows),
        k(depth),
        width(columns),
        weights(panel_bytes(dtype, columns, depth), std::byte{0xff}) {
    const bool narrow = dtype == DType::kBFloat16;
    const std::size_t size = narrow ? 2 : 4;
    // Rows are apart, and the gaps hold NaN, which would spoil a sum that reads them. Weight memory that
    // packing does not write holds NaN too.
    stride = k + 3;
    activations.assign(static_cast<std::size_t>(rows * stride) * size, std::byte{0xff});
    const auto a = random->vector(rows * k);
    const auto w = random->vector(width * k);
    pack_panels(weights.data(), dtype, width, k, 0, width, reinterpret_cast<const std::byte*>(w.data()),
                DType::kFloat32, k);
    const PanelMatrix matrix{weights.data(), dtype, width, k};
    std::vector<float> row_of_w(static_cast<std::size_t>(k));
    expected.resize(static_cast<std::size_t>(rows * width));
    bounds.resize(expected.size());
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < k; ++i) {
        store_from_float(activations.data(), narrow ? DType::kBFloat16 : DType::kFloat32,
                         static_cast<std::size_t>(r * stride + i), a[static_cast<std::size_t>(r * k + i)]);
      }
    }
    for (std::int64_t n = 0; n < width; ++n) {
      unpack_panel_row(matrix, n, row_of_w.data());
      for (std::int64_t r = 0; r < rows; ++r) {
        double sum = 0.0;
        double magnitude = 0.0;
        for (std::int64_t i = 0; i < k; ++i) {
          const double product =
              static_cast<double>(row_of_w[static_cast<std::size_t>(i)]) *
              load_as_float(activations.data(), narrow ? DType::kBFloat16 : DType::kFloat32,
                            static_cast<std::size_t>(r * stride + i));
          sum += product;
          magnitude += std::abs(product);
        }
        const auto index = static_cast<std::size_t>(r * width + n);
        expected[index] = sum;
        // Each of at most k products is rounded, and takes part in at most k + 4 rounded additions.
        bounds[index] = static_cast<double>(k + 5) * kRounding * magnitude;
      }
    }
  }

  [[nodiscard]] PanelGemm gemm(float* out, std::int64_t out_stride) const {
    return {.call = {.a = activations.data(),
                     .a_stride = stride,
                     .panel = weights.data(),
                     .k = k,
                     .width = width,
                     .out = out,
                     .out_stride = out_stride,
                     .rows = rows}};
  }

  std::int64_t rows;
  std::int64_t k;
  std::int64_t width;
  std::int64_t stride = 0;
  std::vector<std::byte> weights;
  std::vector<std::byte> activations;
  std::vector<double> expected;
  std::vector<double> bounds;
};

BOOST_AUTO_TEST_SUITE(gemm)

BOOST_DATA_TEST_CASE(products_match_float64, kernel_tables() * data::make({0, 1, 2}), name, dtype_index) {
  const DType dtype = kDTypes[dtype_index];
  const auto& table = kernel_table(name);
  // Under a sanitizer only widths at which vectors end, and one on each side.
  const auto widths = sanitized<std::vector<std::int64_t>>(
      {1, 4, 15, 16, 17, 33, 63, 64}, {1, 3, 4, 8, 12, 15, 16, 17, 31, 32, 33, 48, 61, 63, 64});
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k :
         {1, 2, 3, 7, 16, 37, 130, 1030}) {  // the last one has several parts on every table
      for (const std::int64_t width : widths) {
        for (const std::int64_t rows : {1, 2, 4, 5, 6, 7, 13}) {
          const Case test(dtype, rows, k, width, &random);
          const std::int64_t stride = width + 2;
          std::vector<float> out(static_cast<std::size_t>(rows * stride), kPoison);
          table.gemm[static_cast<std::size_t>(dtype)](test.gemm(out.data(), stride));
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t n = 0; n < width; ++n) {
              const auto index = static_cast<std::size_t>(r * width + n);
              const double error =
                  std::abs(out[static_cast<std::size_t>(r * stride + n)] - test.expected[index]);
              BOOST_TEST_REQUIRE(error <= test.bounds[index], "rows " << rows << " k " << k << " width "
                                                                      << width << " row " << r << " column "
                                                                      << n);
            }
            BOOST_TEST_REQUIRE(out[static_cast<std::size_t>(r * stride + width)] == kPoison);
            BOOST_TEST_REQUIRE(out[static_cast<std::size_t>(r * stride + width + 1)] == kPoison);
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(a_row_has_the_same_bits_alone_and_in_any_crowd, kernel_tables() * data::make({0, 1, 2}),
                     name, dtype_index) {
  const DType dtype = kDTypes[dtype_index];
  const auto& gemm = kernel_table(name).gemm[static_cast<std::size_t>(dtype)];
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {5, 16, 24, 40, 61, 64}) {
      const Case test(dtype, 23, 1301, width, &random);  // k has more than one part
      std::vector<float> alone(static_cast<std::size_t>(23 * width));
      for (std::int64_t r = 0; r < 23; ++r) {
        auto one = test.gemm(alone.data() + r * width, width);
        one.call.a = test.activations.data() +
                     static_cast<std::size_t>(r * test.stride) * (dtype == DType::kBFloat16 ? 2 : 4);
        one.call.rows = 1;
        gemm(one);
      }
      for (std::int64_t rows = 2; rows <= 23; ++rows) {
        std::vector<float> crowd(static_cast<std::size_t>(rows * width), kPoison);
        auto many = test.gemm(crowd.data(), width);
        many.call.rows = rows;
        many.call.next_panel = test.weights.data();
        gemm(many);
        BOOST_TEST_REQUIRE(std::memcmp(crowd.data(), alone.data(), crowd.size() * sizeof(float)) == 0,
                           "width " << width << " rows " << rows);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(accumulating_adds_the_product_to_what_was_there, kernel_tables() * data::make({0, 1, 2}),
                     name, dtype_index) {
  const DType dtype = kDTypes[dtype_index];
  const auto& gemm = kernel_table(name).gemm[static_cast<std::size_t>(dtype)];
  FreshRandom random;
  for (const std::int64_t width : {9, 30, 64}) {
    const Case test(dtype, 9, 16, width, &random);
    const auto before = random.vector(9 * width);
    std::vector<float> product(before.size());
    gemm(test.gemm(product.data(), width));
    auto sums = before;
    auto accumulating = test.gemm(sums.data(), width);
    accumulating.accumulate = true;
    gemm(accumulating);
    for (std::size_t i = 0; i < sums.size(); ++i) BOOST_TEST_REQUIRE(sums[i] == before[i] + product[i]);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::gemm_test
