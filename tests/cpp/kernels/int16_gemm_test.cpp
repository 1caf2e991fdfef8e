// Products of 16-bit activations: against float64, and bit by bit between tables and numbers of rows.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/int16_spans.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"
#include "quantized_matrix.h"
#include "support/sanitized.h"

namespace adaptrt::int16_gemm_test {
namespace {

namespace data = boost::unit_test::data;

constexpr Quantization kForms[] = {
    {.algo = QuantAlgo::kW8A16},
    {.algo = QuantAlgo::kW8A16, .zero_points = true},
    {.algo = QuantAlgo::kW8A16, .group_size = 16, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW8A16, .group_size = 32, .zero_points = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .group_size = 32, .minimums = true, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW8A16, .group_size = 384, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A16},
    {.algo = QuantAlgo::kW4A16, .group_size = 8},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .zero_points = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .minimums = true, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW4A16, .group_size = 128, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .minimums = true, .scale_type = DType::kFloat32, .bits = 2},
    {.algo = QuantAlgo::kW4A16, .group_size = 64, .zero_points = true, .bits = 3},
    {.algo = QuantAlgo::kW4A16, .bits = 3},
};
/// Unit roundoff of float32.
constexpr double kRounding = 0x1p-24;

/// bfloat16 rows of numbers, and what round_to_int16 makes of them.
struct Rows {
  Rows(const KernelTable& table, const Quantization& how, const std::vector<float>& x, std::int64_t count,
       std::int64_t inputs)
      : k(inputs),
        stride(padded_int16_inputs(k) + 5),
        spans(span_count(how, k)),
        a(x.size() * 2),
        q(static_cast<std::size_t>(count * stride), 31111),
        scales(static_cast<std::size_t>(count * spans)),
        sums(scales.size()) {
    for (std::size_t i = 0; i < x.size(); ++i) store_from_float(a.data(), DType::kBFloat16, i, x[i]);
    for (std::int64_t r = 0; r < count; ++r) {
      table.round_to_int16(a.data() + r * k * 2, k, how, q.data() + r * stride, scales.data() + r * spans,
                           sums.data() + r * spans);
    }
  }

  [[nodiscard]] double x(std::int64_t row, std::int64_t input) const {
    return load_as_float(a.data(), DType::kBFloat16, static_cast<std::size_t>(row * k + input));
  }

  [[nodiscard]] std::vector<float> multiply(const KernelTable& table, const QuantizedMatrix& weights,
                                            std::int64_t first, std::int64_t count) const {
    std::vector<float> out(static_cast<std::size_t>(count * weights.n), kPoison);
    table.int16_gemm({.call = {.a = q.data() + first * stride,
                               .a_stride = stride,
                               .panel = weights.panels.data(),
                               .k = k,
                               .width = weights.n,
                               .out = out.data(),
                               .out_stride = weights.n,
                               .rows = count},
                      .a_scales = scales.data() + first * spans,
                      .a_sums = sums.data() + first * spans,
                      .spans = spans,
                      .quantization = weights.quantization});
    return out;
  }

  std::int64_t k;
  std::int64_t stride;
  std::int64_t spans;
  std::vector<std::byte> a;
  std::vector<std::int16_t> q;
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
};

/// Numbers of very different magnitudes, as bfloat16 has them.
std::vector<float> spread_numbers(FreshRandom* random, std::int64_t count) {
  std::vector<float> x = random->vector(count);
  for (float& value : x) value = std::ldexp(value, static_cast<int>(random->between(-20.0F, 3.0F)));
  return x;
}

/// Inputs that fit the form: narrow matrices have whole words.
std::vector<std::int64_t> depths_of(const Quantization& how) {
  if (how.bits < 4) return sanitized<std::vector<std::int64_t>>({64, 288}, {32, 64, 288, 704});
  return sanitized<std::vector<std::int64_t>>({7, 37, 515}, {1, 2, 7, 8, 37, 130, 256, 515, 800});
}

bool same_bits(const std::vector<float>& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;
}

BOOST_AUTO_TEST_SUITE(int16_gemm)

BOOST_DATA_TEST_CASE(rows_are_rounded_as_their_spans_allow, kernel_tables() * data::xrange(std::size(kForms)),
                     name, form) {
  const auto& table = kernel_table(name);
  if (table.int16_gemm == nullptr) return;
  const Quantization& how = kForms[form];
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : depths_of(how)) {
      std::vector<float> numbers = spread_numbers(&random, k);
      if (k > 2) numbers[2] = 3.0e38F;
      // Spans of groups of up to 32 inputs, above and below the least exponent.
      if (k >= 130) {
        std::fill_n(numbers.begin() + 32, 32, -0x1.8p-95F);
        std::fill_n(numbers.begin() + 64, 32, 0x1p-103F);
      }
      const Rows rows(table, how, numbers, 1, k);
      for (InputSpan span(how, k); span.first() < k; span.next()) {
        double largest = 0.0;
        std::int32_t sum = 0;
        for (std::int64_t i = span.first(); i < span.end(); ++i) {
          largest = std::max(largest, std::abs(rows.x(0, i)));
        }
        const auto index = static_cast<std::size_t>(span.index());
        const double scale = rows.scales[index];
        BOOST_TEST_REQUIRE(scale == std::exp2(std::max(std::floor(std::log2(largest)), -100.0) - 14.0));
        for (std::int64_t i = span.first(); i < span.end(); ++i) {
          const auto q = rows.q[static_cast<std::size_t>(i)];
          const double error = std::abs(q * scale - rows.x(0, i));
          BOOST_TEST_REQUIRE(q == std::nearbyint(rows.x(0, i) / scale));
          BOOST_TEST_REQUIRE(error <= std::max(largest * 0x1p-15, 0x1p-115));
          if (std::abs(rows.x(0, i)) >= largest * 0x1p-7) BOOST_TEST_REQUIRE(error == 0.0);
          sum += q;
        }
        BOOST_TEST_REQUIRE(rows.sums[index] == sum);
      }
      for (std::int64_t i = k; i < padded_int16_inputs(k); ++i) {
        BOOST_TEST_REQUIRE(rows.q[static_cast<std::size_t>(i)] == 0);
      }
      BOOST_TEST_REQUIRE(rows.q[static_cast<std::size_t>(padded_int16_inputs(k))] == 31111);
    }
  }
}

BOOST_DATA_TEST_CASE(products_match_float64, kernel_tables() * data::xrange(std::size(kForms)), name, form) {
  const auto& table = kernel_table(name);
  if (table.int16_gemm == nullptr) return;
  const Quantization& how = kForms[form];
  const std::vector<std::int64_t> widths =
      sanitized<std::vector<std::int64_t>>({4, 61}, {1, 4, 16, 33, 61, 64});
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : depths_of(how)) {
      for (const std::int64_t width : widths) {
        for (const std::int64_t count : {1, 2, 3, 5, 13}) {
          const QuantizedMatrix weights(how, width, k, &random);
          const auto w = weights.values();
          const Rows rows(table, how, spread_numbers(&random, count * k), count, k);
          const auto out = rows.multiply(table, weights, 0, count);
          for (std::int64_t r = 0; r < count; ++r) {
            for (std::int64_t n = 0; n < width; ++n) {
              double exact = 0.0;
              double of_rounded = 0.0;  // the sum of products with rounded activations
              double magnitude = 0.0;
              double bound = 0.0;
              for (InputSpan span(how, k); span.first() < k; span.next()) {
                const double scale = rows.scales[static_cast<std::size_t>(r * rows.spans + span.index())];
                for (std::int64_t i = span.first(); i < span.end(); ++i) {
                  const double weight = w[static_cast<std::size_t>(n * k + i)];
                  const double q = rows.q[static_cast<std::size_t>(r * rows.stride + i)];
                  exact += weight * rows.x(r, i);
                  of_rounded += weight * q * scale;
                  // Terms that cancel: integers up to 255 with scales up to 0.1, and minimums up to 1.
                  magnitude += std::abs(q * scale) * (how.minimums ? 26.5 : std::abs(weight));
                  // Half of the scale is at most 2^-15 of the span's largest number.
                  bound += std::abs(weight) * scale / 2;
                }
              }
              // A sum of integers, the product with the scale, the minimum's product and the difference are
              // rounded, and then the total after each span.
              const double rounding = static_cast<double>(rows.spans + 4) * kRounding * magnitude;
              const double found = out[static_cast<std::size_t>(r * width + n)];
              BOOST_TEST_REQUIRE(std::abs(found - of_rounded) <= rounding,
                                 "k " << k << " width " << width << " rows " << count << ": " << found
                                      << " is not " << of_rounded << " within " << rounding);
              BOOST_TEST_REQUIRE(std::abs(found - exact) <= bound + rounding);
            }
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(a_row_has_the_same_bits_in_any_crowd_and_table,
                     kernel_tables() * data::xrange(std::size(kForms)), name, form) {
  const auto& table = kernel_table(name);
  if (table.int16_gemm == nullptr) return;
  const auto& portable = kernel_table("portable");
  const Quantization& how = kForms[form];
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    // More inputs than any table decodes at a time.
    const std::int64_t k = how.bits < 4 ? 1120 : 1283;
    constexpr std::int64_t kMost = 17;
    for (const std::int64_t width : {5, 16, 40, 61, 64}) {
      const QuantizedMatrix weights(how, width, k, &random);
      const auto x = spread_numbers(&random, kMost * k);
      const Rows rows(table, how, x, kMost, k);
      const Rows of_portable(portable, how, x, kMost, k);
      BOOST_TEST_REQUIRE((rows.q == of_portable.q && rows.sums == of_portable.sums));
      const auto all = of_portable.multiply(portable, weights, 0, kMost);
      for (const std::int64_t count : {1, 2, 3, 4, 5, 6, 7, 12, 13, 17}) {
        BOOST_TEST_REQUIRE(same_bits(rows.multiply(table, weights, 0, count), all.data()),
                           "width " << width << " rows " << count);
        BOOST_TEST_REQUIRE(same_bits(rows.multiply(table, weights, kMost - count, count),
                                     all.data() + (kMost - count) * width),
                           "width " << width << " last rows " << count);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(the_largest_sums_fit, kernel_tables() * data::make({1, 3, 7}), name, count) {
  const auto& table = kernel_table(name);
  if (table.int16_gemm == nullptr) return;
  FreshRandom random;
  constexpr std::int64_t k = 2 * kMaxSpanInputs;
  QuantizedMatrix weights({.algo = QuantAlgo::kW8A16, .zero_points = true}, 64, k, &random);
  weights.scales.assign(weights.scales.size(), 1.0F);
  for (std::size_t n = 0; n < 64; ++n) {
    const bool is_low = n % 2 == 0;
    weights.zeros[n] = is_low ? 255 : 0;
    std::fill_n(weights.weights.begin() + static_cast<std::ptrdiff_t>(n) * k, k,
                is_low ? std::byte{0x80} : std::byte{0x7f});
  }
  weights.pack();
  // 255 is the largest number with an exponent of 7, and becomes 32640 / 128.
  const Rows rows(table, weights.quantization,
                  std::vector<float>(static_cast<std::size_t>(count * k), -255.0F), count, k);
  const auto out = rows.multiply(table, weights, 0, count);
  for (std::size_t i = 0; i < out.size(); ++i) {
    BOOST_TEST_REQUIRE(out[i] == (i % 2 == 0 ? 255.0F : -255.0F) * 255.0F * 512.0F);
  }
}

BOOST_DATA_TEST_CASE(numbers_that_are_not_finite_stay_so, kernel_tables() * data::xrange(std::size(kForms)),
                     name, form) {
  const auto& table = kernel_table(name);
  if (table.int16_gemm == nullptr) return;
  const Quantization& how = kForms[form];
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    constexpr std::int64_t k = 352, kWidth = 40, kInput = 150;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const QuantizedMatrix weights(how, kWidth, k, &random);
    const auto w = weights.values();
    const auto x = random.vector(5 * k);
    const auto finite = Rows(table, how, x, 5, k).multiply(table, weights, 0, 5);
    for (const float special : {kInfinity, -kInfinity, std::nanf("")}) {
      auto changed = x;
      changed[2 * k + kInput] = special;
      const auto out = Rows(table, how, changed, 5, k).multiply(table, weights, 0, 5);
      for (std::int64_t i = 0; i < 5 * kWidth; ++i) {
        const float found = out[static_cast<std::size_t>(i)];
        if (i / kWidth != 2) {
          BOOST_TEST_REQUIRE(found == finite[static_cast<std::size_t>(i)]);
          continue;
        }
        const float expected = special * w[static_cast<std::size_t>(i % kWidth * k + kInput)];
        BOOST_TEST_REQUIRE(!std::isfinite(found));
        // Integers and minimums may cancel, so only weights that are clearly not zero have an expected sign.
        if (std::isinf(expected) && std::abs(w[static_cast<std::size_t>(i % kWidth * k + kInput)]) > 1e-5F) {
          BOOST_TEST_REQUIRE(found == expected);
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(zeros_give_zeros, kernel_tables() * data::xrange(std::size(kForms)), name, form) {
  const auto& table = kernel_table(name);
  if (table.int16_gemm == nullptr) return;
  FreshRandom random;
  constexpr std::int64_t k = 352;
  const QuantizedMatrix weights(kForms[form], 40, k, &random);
  auto x = random.vector(2 * k);
  std::fill_n(x.begin(), k, -0.0F);
  const auto out = Rows(table, kForms[form], x, 2, k).multiply(table, weights, 0, 2);
  for (std::size_t n = 0; n < 40; ++n) BOOST_TEST_REQUIRE(out[n] == 0.0F);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::int16_gemm_test
