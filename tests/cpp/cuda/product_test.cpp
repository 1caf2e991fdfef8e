#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/product_kernel.h"
#include "cuda/kernels/product/tiles.h"
#include "lora_case.h"
#include "print_dtype.h"
#include "rows_case.h"

namespace adaptrt::cuda::product_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16};
constexpr std::uint16_t kNan = 0xffff;

/// Elements at an address that is a multiple of 16.
struct alignas(16) Vector {
  std::uint16_t elements[8];
};

class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t columns)
      : columns_(columns), vectors_(static_cast<std::size_t>(rows * columns / 8)) {
    std::fill_n(data(), rows * columns, kNan);
  }
  [[nodiscard]] std::uint16_t* data() { return vectors_.data()->elements; }
  [[nodiscard]] const std::uint16_t* data() const { return vectors_.data()->elements; }
  [[nodiscard]] std::uint16_t* row(std::int64_t i) { return data() + i * columns_; }
  [[nodiscard]] const std::uint16_t* row(std::int64_t i) const { return data() + i * columns_; }
  [[nodiscard]] std::int64_t columns() const { return columns_; }

 private:
  std::int64_t columns_;
  std::vector<Vector> vectors_;
};

float to_float(DType dtype, std::uint16_t bits) {
  return dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

Matrix random_matrix(DType dtype, std::int64_t rows, std::int64_t columns, FreshRandom* random) {
  Matrix matrix(rows, columns);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const float value = random->real(-8, 8);
    matrix.data()[i] = dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
  }
  return matrix;
}

Matrix multiply(DType dtype, const Matrix& x, std::int64_t tokens, const Matrix& weights,
                std::int32_t out_size) {
  Matrix y(tokens, out_size);
  const ProductKernel kernel(
      {.dtype = dtype, .in_size = static_cast<std::int32_t>(x.columns()), .out_size = out_size});
  kernel.enqueue(tokens, {.x = x.data(), .weights = weights.data()}, y.data(), nullptr);
  return y;
}

/// Number of elements of y that differ from the float64 sum by more than rounding.
std::int64_t wrong_elements(DType dtype, const Matrix& x, std::int64_t tokens, const Matrix& weights,
                            std::int32_t out_size, const Matrix& y) {
  const double rounding = dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  std::int64_t wrong = 0;
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int32_t output = 0; output < out_size; ++output) {
      double sum = 0;
      double magnitude = 0;
      for (std::int64_t column = 0; column < x.columns(); ++column) {
        const double term = static_cast<double>(to_float(dtype, x.row(token)[column])) *
                            to_float(dtype, weights.row(output)[column]);
        sum += term;
        magnitude += std::abs(term);
      }
      const double error = std::abs(to_float(dtype, y.row(token)[output]) - sum);
      const double bound = std::abs(sum) * rounding + magnitude * 0x1p-20 + 0x1p-24;
      wrong += static_cast<std::int64_t>(!(error <= bound));
    }
  }
  return wrong;
}

BOOST_AUTO_TEST_SUITE(product_kernel)

BOOST_DATA_TEST_CASE(products_match_float64, data::make(kDTypes) * data::make({1, 8, 31, 33}), dtype,
                     tokens) {
  for (const auto& [in_size, out_size] : {std::pair{8, 8}, {64, 72}, {200, 64}, {328, 136}}) {
    FreshRandom random;
    BOOST_TEST_CONTEXT("seed " << random.seed() << ", " << in_size << " to " << out_size) {
      const Matrix weights = random_matrix(dtype, out_size, in_size, &random);
      const Matrix x = random_matrix(dtype, tokens, in_size, &random);
      const Matrix y = multiply(dtype, x, tokens, weights, out_size);
      BOOST_TEST(wrong_elements(dtype, x, tokens, weights, out_size, y) == 0);
    }
  }
}

BOOST_DATA_TEST_CASE(float32_outputs_round_to_the_others, data::make(kDTypes) * data::make({1, 31, 33}),
                     dtype, tokens) {
  for (const auto& [in_size, out_size] : {std::pair{8, 8}, {200, 72}, {328, 136}}) {
    FreshRandom random;
    BOOST_TEST_CONTEXT("seed " << random.seed() << ", " << in_size << " to " << out_size) {
      const Matrix weights = random_matrix(dtype, out_size, in_size, &random);
      const Matrix x = random_matrix(dtype, tokens, in_size, &random);
      const Matrix rounded = multiply(dtype, x, tokens, weights, out_size);
      Tensor<float> y(std::int64_t{tokens} * out_size);
      const ProductKernel kernel(
          {.dtype = dtype, .in_size = in_size, .out_size = out_size, .float32_output = true});
      kernel.enqueue(tokens, {.x = x.data(), .weights = weights.data()}, y.data(), nullptr);
      std::int64_t wrong = 0;
      std::int64_t exact = 0;
      for (std::int64_t i = 0; i < y.size(); ++i) {
        const auto bits = dtype == DType::kFloat16 ? float_to_float16(y[i]) : float_to_bfloat16(y[i]);
        wrong += static_cast<std::int64_t>(bits != rounded.data()[i]);
        exact += static_cast<std::int64_t>(y[i] == to_float(dtype, bits));
      }
      BOOST_TEST(wrong == 0);
      // They are not rounded to 16 bits.
      BOOST_TEST(exact < y.size() / 2);
      BOOST_TEST(y.rest_is_unchanged());
    }
  }
}

/// Copies the first half of each row to the second, optionally negated.
void repeat_half(Matrix* matrix, std::int64_t rows, bool negate) {
  const auto half = matrix->columns() / 2;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < half; ++column) {
      const auto bits = matrix->row(row)[column];
      matrix->row(row)[half + column] = static_cast<std::uint16_t>(negate ? bits ^ 0x8000U : bits);
    }
  }
}

BOOST_DATA_TEST_CASE(a_token_does_not_depend_on_the_others, data::make(kDTypes), dtype) {
  constexpr std::int32_t kIn = 272;
  constexpr std::int32_t kOut = 72;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    // The halves of a sum cancel, so that y depends on the order of the sum.
    Matrix weights = random_matrix(dtype, kOut, kIn, &random);
    repeat_half(&weights, kOut, false);
    Matrix token = random_matrix(dtype, 1, kIn, &random);
    repeat_half(&token, 1, true);
    const Matrix alone = multiply(dtype, token, 1, weights, kOut);
    for (const int tokens : {2, 8, 33, 70}) {
      // All other tokens are NaN.
      Matrix x(tokens, kIn);
      const int place = random.integer(0, tokens - 1);
      std::copy_n(token.data(), kIn, x.row(place));
      const Matrix y = multiply(dtype, x, tokens, weights, kOut);
      BOOST_CHECK_EQUAL_COLLECTIONS(y.row(place), y.row(place) + kOut, alone.data(), alone.data() + kOut);
    }
  }
}

BOOST_AUTO_TEST_CASE(invalid_arguments_are_refused_by_name) {
  const auto says = [](const std::string& text) {
    return [text](const ConfigError& error) {
      return std::string(error.what()).find(text) != std::string::npos;
    };
  };
  BOOST_CHECK_EXCEPTION(
      ProductKernel({.dtype = DType::kFloat32, .in_size = 12, .out_size = 0}), ConfigError,
      says("dtype is float32; expected float16 or bfloat16; in_size is 12; expected a positive "
           "multiple of 8; out_size is 0; expected a positive multiple of 8"));
  const ProductKernel kernel({.in_size = 8, .out_size = 8});
  Matrix x(1, 8);
  Matrix weights(8, 8);
  Matrix y(1, 8);
  BOOST_CHECK_EXCEPTION(kernel.enqueue(-1, {.x = x.data(), .weights = weights.data()}, y.data(), nullptr),
                        ConfigError, says("tokens is -1; expected 0 to "));
  BOOST_CHECK_EXCEPTION(kernel.enqueue(1, {.x = x.data() + 1, .weights = weights.data()}, y.data(), nullptr),
                        ConfigError, says("an address is not aligned"));
  kernel.enqueue(0, {.x = x.data(), .weights = weights.data()}, y.data(), nullptr);
  BOOST_TEST(*y.data() == kNan);
}

BOOST_AUTO_TEST_CASE(every_tile_is_chosen_and_holds_few_tokens) {
  constexpr int kMultiprocessors = 132;
  std::set<std::size_t> chosen;
  for (const auto& [in_size, out_size] : {std::pair{4096, 4096},
                                          {4096, 6144},
                                          {4096, 28672},
                                          {14336, 4096},
                                          {4096, 128256},
                                          {2048, 2048},
                                          {2048, 3072},
                                          {2048, 16384}}) {
    for (const int tokens : {1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200, 256, 512, 1024, 4096}) {
      const auto tile = product::choose_tile(tokens, in_size, out_size, kMultiprocessors);
      BOOST_TEST_REQUIRE(tile < product::kTiles.size());
      if (tokens <= 64) BOOST_TEST(product::kTiles[tile].tokens >= tokens);
      chosen.insert(tile);
    }
  }
  BOOST_TEST(chosen.size() == product::kTiles.size());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::product_test
