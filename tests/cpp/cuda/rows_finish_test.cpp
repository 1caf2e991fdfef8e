#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/row_kernels.h"
#include "print_dtype.h"
#include "rows_case.h"

BOOST_TEST_DONT_PRINT_LOG_VALUE(adaptrt::LinearEpilogue)

namespace adaptrt::cuda::rows_finish_test {
namespace {

namespace data = boost::unit_test::data;

constexpr LinearEpilogue kEpilogues[] = {
    LinearEpilogue::kStore,          LinearEpilogue::kSiluMul,     LinearEpilogue::kGeluMul,
    LinearEpilogue::kGeluTanhMul,    LinearEpilogue::kGelu,        LinearEpilogue::kGeluTanh,
    LinearEpilogue::kRelu,           LinearEpilogue::kReluMul,     LinearEpilogue::kReluMulRelu,
    LinearEpilogue::kClampedSiluMul, LinearEpilogue::kReluSquared,
};

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

double gelu(double x) {
  return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
}

double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

double finished(LinearEpilogue epilogue, double y, double linear, double threshold) {
  switch (epilogue) {
    case LinearEpilogue::kStore:
    case LinearEpilogue::kAdd:
      return y;
    case LinearEpilogue::kSiluMul:
      return y * sigmoid(y) * linear;
    case LinearEpilogue::kGeluMul:
      return gelu(y) * linear;
    case LinearEpilogue::kGeluTanhMul:
      return gelu_tanh(y) * linear;
    case LinearEpilogue::kGelu:
      return gelu(y);
    case LinearEpilogue::kGeluTanh:
      return gelu_tanh(y);
    case LinearEpilogue::kRelu:
      return std::max(y, 0.0);
    case LinearEpilogue::kReluSquared:
      return std::max(y, 0.0) * std::max(y, 0.0);
    case LinearEpilogue::kReluMul:
      return y > threshold ? y * linear : 0;
    case LinearEpilogue::kReluMulRelu:
      return y > threshold ? y * std::max(linear, 0.0) : 0;
    case LinearEpilogue::kClampedSiluMul: {
      const double gate = std::min(y, 7.0);
      return gate * sigmoid(1.702 * gate) * (std::clamp(linear, -7.0, 7.0) + 1);
    }
  }
  return 0;
}

struct Options {
  bool has_bias = false;
  bool has_bias_rows = false;  ///< rows have different biases
  float scale = 1.0F;
  float softcap = 0.0F;
};

class FinishCase {
 public:
  FinishCase(DType dtype, LinearEpilogue epilogue, std::int64_t tokens, std::int64_t width, Options options,
             FreshRandom* random)
      : dtype_(dtype),
        epilogue_(epilogue),
        tokens_(tokens),
        width_(width),
        parts_(is_gated(epilogue) ? 2 : 1),
        options_(options),
        product_(random_elements(dtype, tokens * width * parts_, random, 12)),
        bias_(random_floats(kBiases * width * parts_, random)) {
    for (std::int64_t token = 0; token < tokens; ++token)
      bias_rows_.push_back(random->integer(0, kBiases - 1));
  }

  [[nodiscard]] Tensor<std::uint16_t> run() const {
    Tensor<std::uint16_t> output(tokens_ * width_);
    enqueue(work(product_.data(), 0, tokens_, output.data()), nullptr);
    return output;
  }

  /// One token's row, finished by itself and over its product if possible.
  [[nodiscard]] std::vector<std::uint16_t> run_alone(std::int64_t token) const {
    Tensor<std::uint16_t> row(width_ * parts_);
    std::copy_n(product_.data() + token * width_ * parts_, width_ * parts_, row.data());
    Tensor<std::uint16_t> output(width_);
    enqueue(work(row.data(), token, 1, parts_ == 1 ? row.data() : output.data()), nullptr);
    return (parts_ == 1 ? row : output).values(0, width_);
  }

  [[nodiscard]] std::int64_t wrong_elements(const Tensor<std::uint16_t>& output) const {
    std::int64_t wrong = 0;
    for (std::int64_t token = 0; token < tokens_; ++token) {
      for (std::int64_t column = 0; column < width_; ++column) {
        const double y = value(token, column);
        const double linear = parts_ == 2 ? value(token, column + width_) : 0;
        // Values next to a bound may fall on either side of it.
        if (is_relu_gated(epilogue_) && std::abs(y - kThreshold) < 1e-5) continue;
        const double expected = finished(epilogue_, y, linear, kThreshold);
        const double factor = epilogue_ == LinearEpilogue::kReluSquared ? y : linear;
        const double extra = (std::abs(y) + 1) * (std::abs(factor) + 1) * 0x1p-20;
        const auto bits = output[token * width_ + column];
        wrong += static_cast<std::int64_t>(!is_rounded(expected, dtype_, bits, extra));
      }
    }
    return wrong;
  }

 private:
  static constexpr float kThreshold = 0.5F;
  static constexpr int kBiases = 3;

  [[nodiscard]] Finish work(const std::uint16_t* product, std::int64_t first_token, std::int64_t tokens,
                            std::uint16_t* output) const {
    return {.dtype = dtype_,
            .tokens = tokens,
            .width = width_,
            .product = product,
            .bias = options_.has_bias ? bias_.data() : nullptr,
            .bias_rows = options_.has_bias_rows ? bias_rows_.data() + first_token : nullptr,
            .scale = options_.scale,
            .softcap = options_.softcap,
            .epilogue = epilogue_,
            .threshold = kThreshold,
            .output = output};
  }

  [[nodiscard]] double value(std::int64_t token, std::int64_t column) const {
    double y = element(dtype_, product_[token * width_ * parts_ + column]);
    const std::int64_t row = options_.has_bias_rows ? bias_rows_[static_cast<std::size_t>(token)] : 0;
    if (options_.has_bias) y += bias_[row * width_ * parts_ + column];
    if (column < width_) y *= options_.scale;  // not the columns that a gate multiplies
    return options_.softcap == 0.0F ? y : options_.softcap * std::tanh(y / options_.softcap);
  }

  DType dtype_;
  LinearEpilogue epilogue_;
  std::int64_t tokens_;
  std::int64_t width_;
  std::int64_t parts_;
  Options options_;
  Tensor<std::uint16_t> product_;
  Tensor<float> bias_;
  std::vector<std::int32_t> bias_rows_;
};

BOOST_AUTO_TEST_SUITE(row_kernels)

BOOST_DATA_TEST_CASE(finished_outputs_match_float64, data::make(kRowTypes) * data::make(kEpilogues), dtype,
                     epilogue) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed() << ", epilogue " << static_cast<int>(epilogue)) {
    for (const auto& [tokens, width] : {std::pair{1, 8}, {3, 96}, {2, 4096}, {17, 1000}}) {
      for (const Options& options : {Options{}, Options{.has_bias = true, .has_bias_rows = true},
                                     Options{.has_bias = true, .scale = 0.3F, .softcap = 5.0F}}) {
        const FinishCase finish(dtype, epilogue, tokens, width, options, &random);
        const auto output = finish.run();
        BOOST_TEST(finish.wrong_elements(output) == 0);
        BOOST_TEST(output.rest_is_unchanged());
        const std::int64_t token = tokens - 1;
        BOOST_TEST(finish.run_alone(token) == output.values(token * width, width));
      }
    }
  }
}

BOOST_DATA_TEST_CASE(xielu_matches_float64, data::make(kRowTypes), dtype) {
  FreshRandom random;
  const float parameters[] = {0.7F, 25.0F, 0.5F, -1e-6F};
  const XieluCoefficients by = coefficients_of({.parameters = {parameters, 4}});
  const std::int64_t size = 8 * random.integer(1, 600);
  const auto input = random_elements(dtype, size, &random, 6);
  Tensor<std::uint16_t> output(size);
  enqueue(Xielu{.dtype = dtype,
                .elements = size,
                .coefficients = by,
                .input = input.data(),
                .output = output.data()},
          nullptr);
  const double positive = std::log1p(std::exp(double{parameters[0]}));
  const double negative = double{parameters[2]} + std::log1p(std::exp(double{parameters[1]}));
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const double x = element(dtype, input[i]);
    const double curve =
        x > 0 ? positive * x * x : negative * (std::expm1(std::min(x, double{parameters[3]})) - x);
    const double extra = negative * (std::abs(x) + 1) * 0x1p-21;
    wrong += static_cast<std::int64_t>(!is_rounded(curve + parameters[2] * x, dtype, output[i], extra));
  }
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    BOOST_TEST(wrong == 0);
  }
  BOOST_TEST(output.rest_is_unchanged());
}

BOOST_DATA_TEST_CASE(gated_sums_match_float64, data::make(kRowTypes) * data::make({8, 1032}), dtype, width) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    constexpr std::int64_t kTokens = 5;
    const auto input = random_elements(dtype, kTokens * width, &random);
    auto gate = random_floats(kTokens, &random);
    gate[0] = 90;
    gate[1] = -90;
    const auto before = random_floats(kTokens * width, &random);
    Tensor<float> stream = before;
    enqueue(GatedAdd{.dtype = dtype,
                     .tokens = kTokens,
                     .width = width,
                     .input = input.data(),
                     .gate = gate.data(),
                     .stream = stream.data()},
            nullptr);
    for (std::int64_t i = 0; i < kTokens * width; ++i) {
      const double sigmoid = 1 / (1 + std::exp(-static_cast<double>(gate[i / width])));
      const double expected = before[i] + sigmoid * element(dtype, input[i]);
      BOOST_TEST(std::abs(stream[i] - expected) <= 4e-6);
    }
    BOOST_TEST(stream.rest_is_unchanged());
  }
}

BOOST_AUTO_TEST_CASE(invalid_gated_sums_are_refused) {
  BOOST_CHECK_EXCEPTION(enqueue(GatedAdd{.tokens = 1, .width = 12}, nullptr), ConfigError,
                        [](const ConfigError& error) {
                          return std::string(error.what()).find("GatedAdd: width is 12") != std::string::npos;
                        });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::rows_finish_test
