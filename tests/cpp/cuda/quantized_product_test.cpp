#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/quantized_product_kernel.h"
#include "lora_case.h"
#include "print_dtype.h"
#include "rows_case.h"

namespace adaptrt::cuda::quantized_product_test {
namespace {

namespace data = boost::unit_test::data;

struct Sizes {
  std::int32_t bits;
  std::int32_t in;
  std::int32_t out;
  std::int32_t group;
  bool has_zeros;
};
std::ostream& operator<<(std::ostream& out, const Sizes& sizes) {
  return out << sizes.bits << " bits, " << sizes.in << " to " << sizes.out << ", groups of " << sizes.group
             << (sizes.has_zeros ? " with zeros" : "");
}

/// One group, several groups in a stage of 64 columns, groups of several stages, and a smaller last group.
const Sizes kSizes[] = {{8, 16, 8, 0, false},     {8, 208, 72, 0, false}, {8, 208, 136, 32, true},
                        {8, 336, 64, 128, false}, {4, 32, 8, 0, false},   {4, 224, 72, 128, false},
                        {4, 224, 136, 16, true},  {4, 352, 64, 64, true}};

class Case {
 public:
  Case(const Sizes& sizes, DType dtype, std::int32_t tokens, FreshRandom* random)
      : sizes_(sizes),
        dtype_(dtype),
        tokens_(tokens),
        groups_(config().groups()),
        x_(random_elements(dtype, std::int64_t{tokens} * sizes.in, random)),
        weights_(std::int64_t{sizes.out} * sizes.in * sizes.bits / 8),
        scales_(random_floats(std::int64_t{sizes.out} * groups_, random, 0.5F)),
        zeros_(std::int64_t{sizes.out} * groups_) {
    for (std::int64_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = static_cast<std::uint8_t>(random->integer(0, 255));
    }
    for (std::int64_t i = 0; i < zeros_.size(); ++i) {
      zeros_[i] = static_cast<std::uint8_t>(random->integer(0, (1 << sizes.bits) - 1));
    }
  }

  [[nodiscard]] QuantizedProductKernel::Config config() const {
    return {.dtype = dtype_,
            .bits = sizes_.bits,
            .in_size = sizes_.in,
            .out_size = sizes_.out,
            .group_size = sizes_.group};
  }

  template <typename T>
  [[nodiscard]] Tensor<T> run(const Tensor<std::uint16_t>& x, std::int64_t tokens) const {
    Tensor<T> y(tokens * sizes_.out);
    auto options = config();
    options.float32_output = sizeof(T) == sizeof(float);
    QuantizedProductKernel(options).enqueue(tokens,
                                            {.x = x.data(),
                                             .weights = weights_.data(),
                                             .scales = scales_.data(),
                                             .zeros = sizes_.has_zeros ? zeros_.data() : nullptr},
                                            y.data(), nullptr);
    return y;
  }

  [[nodiscard]] const Tensor<std::uint16_t>& x() const { return x_; }

  /// Number of elements that differ from the float64 sums by more than rounding.
  [[nodiscard]] std::int64_t wrong_elements(const Tensor<std::uint16_t>& y,
                                            const Tensor<float>& exact) const {
    std::int64_t wrong = 0;
    for (std::int32_t token = 0; token < tokens_; ++token) {
      for (std::int32_t output = 0; output < sizes_.out; ++output) {
        double sum = 0;
        double magnitude = 0;
        for (std::int32_t input = 0; input < sizes_.in; ++input) {
          const double term =
              double{element(dtype_, x_[std::int64_t{token} * sizes_.in + input])} * weight(output, input);
          sum += term;
          magnitude += std::abs(term);
        }
        const std::int64_t at = std::int64_t{token} * sizes_.out + output;
        wrong += static_cast<std::int64_t>(!is_rounded(sum, dtype_, y[at], magnitude * 0x1p-20));
        wrong += static_cast<std::int64_t>(!(std::abs(exact[at] - sum) <= magnitude * 0x1p-20));
      }
    }
    return wrong;
  }

 private:
  [[nodiscard]] double weight(std::int32_t output, std::int32_t input) const {
    const std::int64_t at = std::int64_t{output} * sizes_.in + input;
    const std::int64_t group =
        std::int64_t{output} * groups_ + (sizes_.group == 0 ? 0 : input / sizes_.group);
    const int middle = 1 << (sizes_.bits - 1);
    const int zero = sizes_.has_zeros ? zeros_[group] : middle;
    const int integer = sizes_.bits == 8 ? static_cast<std::int8_t>(weights_[at]) + middle
                                         : weights_[at / 2] >> (at % 2 * 4) & 15;
    return double{scales_[group]} * (integer - zero);
  }

  Sizes sizes_;
  DType dtype_;
  std::int32_t tokens_;
  std::int32_t groups_;
  Tensor<std::uint16_t> x_;
  Tensor<std::uint8_t> weights_;
  Tensor<float> scales_;
  Tensor<std::uint8_t> zeros_;
};

BOOST_AUTO_TEST_SUITE(quantized_product_kernel)

BOOST_DATA_TEST_CASE(products_match_float64, data::make(kRowTypes) * data::make(kSizes), dtype, sizes) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int32_t tokens : {1, 35}) {
      const Case product(sizes, dtype, tokens, &random);
      const auto y = product.run<std::uint16_t>(product.x(), tokens);
      const auto exact = product.run<float>(product.x(), tokens);
      BOOST_TEST(product.wrong_elements(y, exact) == 0);
      BOOST_TEST(y.rest_is_unchanged());
      BOOST_TEST(exact.rest_is_unchanged());
    }
  }
}

BOOST_DATA_TEST_CASE(a_token_does_not_depend_on_the_others, data::make({kSizes[2], kSizes[7]}), sizes) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const Case product(sizes, DType::kBFloat16, 1, &random);
    const auto alone = product.run<float>(product.x(), 1);
    for (const int tokens : {2, 8, 33, 70}) {
      // All other tokens are NaN.
      Tensor<std::uint16_t> x(std::int64_t{tokens} * sizes.in);
      const std::int64_t place = random.integer(0, tokens - 1);
      std::copy_n(product.x().data(), sizes.in, x.data() + place * sizes.in);
      const auto y = product.run<float>(x, tokens);
      BOOST_TEST(y.values(place * sizes.out, sizes.out) == alone.values(0, sizes.out));
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
      QuantizedProductKernel({.dtype = DType::kFloat32, .bits = 3, .in_size = 8, .out_size = 4}), ConfigError,
      says("dtype is float32; expected float16 or bfloat16; bits is 3; expected 8 or 4; in_size is 8; "
           "expected "
           "a multiple of 16 from 16 on; out_size is 4; expected a multiple of 8 from 8 on"));
  BOOST_CHECK_EXCEPTION(
      QuantizedProductKernel({.bits = 4, .in_size = 48, .out_size = 8, .group_size = 8}), ConfigError,
      says("in_size is 48; expected a multiple of 32 from 32 on; group_size is 8; expected a multiple of 16 "
           "from 0 on"));
  const QuantizedProductKernel kernel({.in_size = 16, .out_size = 8});
  BOOST_CHECK_EXCEPTION(kernel.enqueue(-1, {}, nullptr, nullptr), ConfigError,
                        says("tokens is -1; expected 0 to "));
  alignas(16) std::uint8_t bytes[32] = {};
  BOOST_CHECK_EXCEPTION(kernel.enqueue(1, {.x = bytes, .weights = bytes + 8}, bytes, nullptr), ConfigError,
                        says("an address is not aligned"));
  kernel.enqueue(0, {}, nullptr, nullptr);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::quantized_product_test
