#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <vector>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"
#include "quantized_matrix.h"
#include "support/sanitized.h"

namespace adaptrt::quantized_gemm_test {
namespace {

namespace data = boost::unit_test::data;

constexpr Quantization kWeightOnly[] = {
    {.algo = QuantAlgo::kW8A16},
    {.algo = QuantAlgo::kW8A16, .group_size = 32, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .group_size = 128, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW8A16, .zero_points = true},
    {.algo = QuantAlgo::kW8A16, .group_size = 32, .zero_points = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A16},
    {.algo = QuantAlgo::kW4A16, .group_size = 8},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .zero_points = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 8, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .zero_points = true, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW8A16, .group_size = 16, .minimums = true, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .minimums = true, .scale_type = DType::kFloat32},
};
/// Their words have the bits of 16 or 32 inputs.
constexpr Quantization kNarrow[] = {
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .minimums = true, .scale_type = DType::kFloat32, .bits = 2},
    {.algo = QuantAlgo::kW4A16,
     .group_size = 64,
     .zero_points = true,
     .scale_type = DType::kFloat16,
     .bits = 3},
};
constexpr DType kActivations[] = {DType::kFloat32, DType::kBFloat16};
/// Unit roundoff of float32, in which all sums are computed.
constexpr double kRounding = 0x1p-24;

/// Activations and one quantised panel.
struct Case {
  Case(const Quantization& quantization, DType activation_type, std::int64_t num_rows, std::int64_t depth,
       std::int64_t columns, FreshRandom* random)
      : weights(quantization, columns, depth, random), activation(activation_type), rows(num_rows) {
    // Rows are apart, and the gaps hold NaN, which would spoil a sum that reads them.
    stride = depth + 3;
    activations.assign(static_cast<std::size_t>(rows * stride) * size_of(activation), std::byte{0xff});
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < depth; ++i) {
        store_from_float(activations.data(), activation, static_cast<std::size_t>(r * stride + i),
                         random->between(-1.0F, 1.0F));
      }
    }
  }

  /// Returns the factors of the zero points, [rows, groups].
  [[nodiscard]] std::vector<float> sums(const KernelTable& table) const {
    const std::int64_t groups = group_count(weights.quantization, weights.k);
    std::vector<float> result(static_cast<std::size_t>(rows * groups));
    for (std::int64_t r = 0; r < rows; ++r) {
      table.sum_groups(activations.data() + static_cast<std::size_t>(r * stride) * size_of(activation),
                       activation, weights.k, weights.quantization.group_size, result.data() + r * groups);
    }
    return result;
  }

  [[nodiscard]] QuantizedGemm gemm(float* out, std::int64_t out_stride) const {
    return {.call = {.a = activations.data(),
                     .a_stride = stride,
                     .panel = weights.panels.data(),
                     .k = weights.k,
                     .width = weights.n,
                     .out = out,
                     .out_stride = out_stride,
                     .rows = rows},
            .activation = activation,
            .quantization = weights.quantization};
  }

  [[nodiscard]] std::vector<std::byte> expanded(const KernelTable& table) const {
    std::vector<std::byte> panel(panel_bytes(activation, weights.n, weights.k));
    table.expand_panel[static_cast<std::size_t>(activation)](gemm(nullptr, 0), panel.data());
    return panel;
  }

  [[nodiscard]] float a(std::int64_t row, std::int64_t input) const {
    return load_as_float(activations.data(), activation, static_cast<std::size_t>(row * stride + input));
  }

  QuantizedMatrix weights;
  DType activation;
  std::int64_t rows;
  std::int64_t stride = 0;
  std::vector<std::byte> activations;
};

/// Returns all sizes, or under a sanitizer those at which loops over rows, columns and inputs begin, end or
/// have a remainder.
std::vector<std::int64_t> sizes(const std::vector<std::int64_t>& all, const std::vector<std::int64_t>& part) {
  return sanitized(part, all);
}

/// Compares rows alone with the same rows in crowds, with and without an expanded panel.
void check_bits_in_crowds(const KernelTable& table, const Quantization& quantization, DType activation,
                          std::int64_t depth) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {5, 16, 40, 61, 64}) {
      const Case test(quantization, activation, 17, depth, width, &random);
      const auto expanded = test.expanded(table);
      const auto sums = test.sums(table);
      const std::int64_t groups = group_count(test.weights.quantization, test.weights.k);
      std::vector<float> alone(static_cast<std::size_t>(17 * width));
      for (std::int64_t r = 0; r < 17; ++r) {
        auto one = test.gemm(alone.data() + r * width, width);
        one.call.a =
            test.activations.data() + static_cast<std::size_t>(r * test.stride) * size_of(test.activation);
        one.call.rows = 1;
        one.a_sums = sums.data() + r * groups;
        multiply(table, one);
      }
      for (std::int64_t rows = 1; rows <= 17; ++rows) {
        for (const bool expand : {false, true}) {
          std::vector<float> crowd(static_cast<std::size_t>(rows * width), kPoison);
          auto many = test.gemm(crowd.data(), width);
          many.call.rows = rows;
          many.a_sums = sums.data();
          if (expand) many.expanded = expanded.data();
          multiply(table, many);
          BOOST_TEST_REQUIRE(std::memcmp(crowd.data(), alone.data(), crowd.size() * sizeof(float)) == 0,
                             "width " << width << " rows " << rows << " expanded " << expand);
        }
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE(quantized_gemm)

BOOST_DATA_TEST_CASE(products_match_float64,
                     kernel_tables() * data::xrange(std::size(kWeightOnly)) * data::make({0, 1}), name,
                     quantization_index, activation_index) {
  const auto& table = kernel_table(name);
  const Quantization& quantization = kWeightOnly[quantization_index];
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : sizes({1, 2, 3, 7, 8, 16, 37, 130}, {1, 7, 37, 130})) {
      for (const std::int64_t width : sizes({1, 3, 4, 8, 15, 16, 17, 33, 61, 64}, {1, 4, 15, 33, 61})) {
        for (const std::int64_t rows : sizes({1, 2, 3, 5, 7, 13}, {1, 3, 5, 13})) {
          const Case test(quantization, kActivations[activation_index], rows, k, width, &random);
          const auto w = test.weights.values();
          const std::int64_t stride = width + 2;
          std::vector<float> out(static_cast<std::size_t>(rows * stride), kPoison);
          const auto sums = test.sums(table);
          auto gemm = test.gemm(out.data(), stride);
          gemm.a_sums = sums.data();
          multiply(table, gemm);
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t n = 0; n < width; ++n) {
              double sum = 0.0;
              double magnitude = 0.0;
              double greatest = 0.0;
              for (std::int64_t i = 0; i < k; ++i) {
                const double weight = w[static_cast<std::size_t>(n * k + i)];
                sum += weight * test.a(r, i);
                magnitude += std::abs(weight * test.a(r, i));
                greatest = std::max(greatest, std::abs(weight));
              }
              // With a zero point, summed values are up to 15 scales (255 for eight bits), while the weight's
              // value may be below one scale.
              const double most = quantization.algo == QuantAlgo::kW4A16 ? 15.0 : 255.0;
              if (quantization.needs_group_sums()) magnitude = static_cast<double>(k) * most * 0.1;
              const double error = std::abs(out[static_cast<std::size_t>(r * stride + n)] - sum);
              BOOST_TEST_REQUIRE(error <= static_cast<double>(k + 8) * kRounding * magnitude,
                                 "rows " << rows << " k " << k << " width " << width << " row " << r
                                         << " column " << n << " error " << error);
            }
            BOOST_TEST_REQUIRE(out[static_cast<std::size_t>(r * stride + width)] == kPoison);
            BOOST_TEST_REQUIRE(out[static_cast<std::size_t>(r * stride + width + 1)] == kPoison);
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(a_row_has_the_same_bits_alone_in_any_crowd_and_with_an_expanded_panel,
                     kernel_tables() * data::xrange(std::size(kWeightOnly)) * data::make({0, 1}), name,
                     quantization_index, activation_index) {
  check_bits_in_crowds(kernel_table(name), kWeightOnly[quantization_index], kActivations[activation_index],
                       205);
}

BOOST_DATA_TEST_CASE(a_row_of_narrow_weights_has_the_same_bits_alone_and_in_any_crowd,
                     kernel_tables() * data::xrange(std::size(kNarrow)) * data::make({0, 1}), name,
                     quantization_index, activation_index) {
  check_bits_in_crowds(kernel_table(name), kNarrow[quantization_index], kActivations[activation_index], 192);
}

BOOST_DATA_TEST_CASE(scales_can_be_apart_from_the_weights, kernel_tables() * data::make({0, 1}), name,
                     activation_index) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {5, 40, 64}) {
      for (const std::int64_t rows : {1, 3, 17, 40}) {
        Case test({.algo = QuantAlgo::kW8A16}, kActivations[activation_index], rows, 37, width, &random);
        std::vector<float> expected(static_cast<std::size_t>(rows * width), kPoison);
        multiply(table, test.gemm(expected.data(), width));
        const std::vector<float> scales = test.weights.scales;
        test.weights.scales.assign(scales.size(), kPoison);
        test.weights.pack();
        for (const bool expand : {false, true}) {
          std::vector<float> found(expected.size(), kPoison);
          auto gemm = test.gemm(found.data(), width);
          const auto expanded = test.expanded(table);
          if (expand) gemm.expanded = expanded.data();
          gemm.scales = scales.data();
          multiply(table, gemm);
          BOOST_TEST_REQUIRE(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0,
                             "width " << width << " rows " << rows << " expanded " << expand);
        }
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

BOOST_AUTO_TEST_SUITE(int8_gemm)

/// x after quantize_row: bytes and scales of `rows` rows.
struct Int8Rows {
  Int8Rows(const KernelTable& table, const std::vector<float>& x, std::int64_t rows, std::int64_t k)
      : stride((k + 3) / 4 * 4),
        bytes(static_cast<std::size_t>(rows * stride)),
        scales(static_cast<std::size_t>(rows)) {
    for (std::int64_t r = 0; r < rows; ++r) {
      table.quantize_row(reinterpret_cast<const std::byte*>(x.data() + r * k), DType::kFloat32, k,
                         bytes.data() + r * stride, scales.data() + r);
    }
  }
  std::int64_t stride;
  std::vector<std::uint8_t> bytes;
  std::vector<float> scales;
};

/// Checks that products of random W8A8 weights equal those of integers.
void check_int8_product(const KernelTable& table, std::int64_t rows, std::int64_t width, std::int64_t k,
                        FreshRandom* random) {
  const Quantization quantization{.algo = QuantAlgo::kW8A8};
  const QuantizedMatrix weights(quantization, width, k, random);
  const auto w = weights.values();
  const auto x = random->vector(rows * k, -3.0F, 2.0F);
  const Int8Rows a(table, x, rows, k);
  std::vector<float> out(static_cast<std::size_t>(rows * width), kPoison);
  table.int8_gemm({.call = {.a = a.bytes.data(),
                            .a_stride = a.stride,
                            .panel = weights.panels.data(),
                            .k = k,
                            .width = width,
                            .out = out.data(),
                            .out_stride = width,
                            .rows = rows},
                   .a_scales = a.scales.data()});
  const auto parts = parts_of_panel(quantization, weights.panels.data(), k, width);
  for (std::int64_t n = 0; n < width; ++n) {
    const float scale = load_as_float(parts.scales, DType::kFloat32, static_cast<std::size_t>(n));
    std::vector<std::int32_t> q(static_cast<std::size_t>(k));
    for (std::int64_t i = 0; i < k; ++i) {
      q[static_cast<std::size_t>(i)] =
          static_cast<std::int32_t>(std::lround(w[static_cast<std::size_t>(n * k + i)] / scale));
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::uint8_t* row = a.bytes.data() + r * a.stride;
      std::int32_t sum = 0;
      for (std::int64_t i = 0; i < k; ++i) sum += q[static_cast<std::size_t>(i)] * (row[i] - 128);
      const float expected = static_cast<float>(sum) * scale * a.scales[static_cast<std::size_t>(r)];
      BOOST_TEST_REQUIRE(
          out[static_cast<std::size_t>(r * width + n)] == expected,
          "rows " << rows << " width " << width << " k " << k << " row " << r << " column " << n);
    }
  }
}

BOOST_DATA_TEST_CASE(sums_are_exact_and_every_table_gives_the_same_bits, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : {1, 3, 4, 7, 37, 130, 517}) {
      for (const std::int64_t width : {1, 3, 8, 16, 17, 33, 61, 64}) {
        for (const std::int64_t rows : {1, 2, 3, 5, 6, 7, 13})
          check_int8_product(table, rows, width, k, &random);
      }
    }
    // Whole tiles, and more steps than one copy.
    for (const std::int64_t rows : {40, 232}) check_int8_product(table, rows, 64, 1190, &random);
  }
}

BOOST_DATA_TEST_CASE(extreme_sums_do_not_wrap, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  const std::int64_t k = kMaxInt8Inputs;
  const Quantization quantization{.algo = QuantAlgo::kW8A8};
  std::vector<std::byte> weights(static_cast<std::size_t>(2 * k), std::byte{127});
  std::fill(weights.begin() + k, weights.end(), std::byte{0x80});  // -128, which a checkpoint may contain
  const float scales[] = {1.0F, 1.0F};
  std::vector<std::byte> panels(panel_bytes(quantization, DType::kFloat32, 2, k));
  pack_quantized_panels(panels.data(), quantization, 2, k, 0, 2, {weights.data(), scales, nullptr});
  const Int8Rows a(table, std::vector<float>(static_cast<std::size_t>(k), 127.0F), 1, k);
  float out[2];
  table.int8_gemm({.call = {.a = a.bytes.data(),
                            .a_stride = a.stride,
                            .panel = panels.data(),
                            .k = k,
                            .width = 2,
                            .out = out,
                            .out_stride = 2,
                            .rows = 1},
                   .a_scales = a.scales.data()});
  BOOST_TEST(out[0] == 127.0F * 127.0F * 65536.0F);
  BOOST_TEST(out[1] == -128.0F * 127.0F * 65536.0F);
}

BOOST_DATA_TEST_CASE(rows_are_rounded_to_the_nearest_of_255_values, kernel_tables() * data::make({0, 1, 2}),
                     name, type_index) {
  const auto& table = kernel_table(name);
  const DType type = static_cast<DType>(type_index);
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t n : {1, 2, 5, 16, 31, 64, 101}) {
      std::vector<std::byte> x(static_cast<std::size_t>(n) * size_of(type));
      float greatest = 0.0F;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto index = static_cast<std::size_t>(i);
        store_from_float(x.data(), type, index, random.between(-5.0F, 5.0F));
        greatest = std::max(greatest, std::abs(load_as_float(x.data(), type, index)));
      }
      std::vector<std::uint8_t> out(static_cast<std::size_t>((n + 3) / 4 * 4), 7);
      float scale = 0.0F;
      table.quantize_row(x.data(), type, n, out.data(), &scale);
      BOOST_TEST_REQUIRE(scale == greatest / 127.0F);
      for (std::size_t i = 0; i < out.size(); ++i) {
        if (i >= static_cast<std::size_t>(n)) {
          BOOST_TEST_REQUIRE(out[i] == 128);
          continue;
        }
        const double exact = static_cast<double>(load_as_float(x.data(), type, i)) / scale;
        // Half a step, and the rounding of the factor and the product.
        BOOST_TEST_REQUIRE(std::abs(out[i] - 128 - exact) <= 0.5 + 127 * 2 * kRounding * 2);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(rows_of_zeros_and_of_no_numbers, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  std::uint8_t out[4];
  float scale = 1.0F;
  const auto quantize = [&](std::vector<float> x) {
    table.quantize_row(reinterpret_cast<const std::byte*>(x.data()), DType::kFloat32, 3, out, &scale);
  };
  quantize({0.0F, -0.0F, 0x1p-120F});
  BOOST_TEST(scale == 0.0F);
  BOOST_TEST((out[0] == 128 && out[1] == 128 && out[2] == 128));
  quantize({1.0F, std::nanf(""), 2.0F});
  BOOST_TEST(std::isnan(scale));
  quantize({1.0F, -INFINITY, 2.0F});
  BOOST_TEST(std::isnan(scale));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::quantized_gemm_test
