#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"
#include "quantized_matrix.h"
#include "support/sanitized.h"

namespace adaptrt::w4a8_gemm_test {
namespace {

namespace data = boost::unit_test::data;

constexpr Quantization kQuantizations[] = {
    {.algo = QuantAlgo::kW4A8},
    {.algo = QuantAlgo::kW4A8, .zero_points = true},
    {.algo = QuantAlgo::kW4A8, .group_size = 8, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A8, .group_size = 32, .zero_points = true},
    {.algo = QuantAlgo::kW4A8, .group_size = 128, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW4A8, .group_size = 96},
    {.algo = QuantAlgo::kW4A8, .group_size = 2048},
    {.algo = QuantAlgo::kW4A8, .bits = 3},
    {.algo = QuantAlgo::kW4A8, .group_size = 64, .zero_points = true, .bits = 3},
    {.algo = QuantAlgo::kW4A8, .group_size = 16, .bits = 2},
    {.algo = QuantAlgo::kW4A8,
     .group_size = 64,
     .zero_points = true,
     .scale_type = DType::kFloat16,
     .bits = 2},
};

/// Rows in the kernels' format; `q` has their plain integers, [rows, k].
struct Int8Rows {
  Int8Rows(const KernelTable& table, const Quantization& how, std::int64_t num_rows, std::int64_t k,
           const std::vector<float>& x)
      : groups(group_count(how, k)),
        stride((k + 64 + 63) / 64 * 64),
        bytes(static_cast<std::size_t>((num_rows + 15) * stride), 0x55),
        scales(static_cast<std::size_t>(num_rows)),
        sums(static_cast<std::size_t>(num_rows * groups)) {
    for (std::int64_t r = 0; r < num_rows; ++r) {
      std::uint8_t* row = bytes.data() + r * stride;
      table.quantize_row(reinterpret_cast<const std::byte*>(x.data() + r * k), DType::kFloat32, k, row,
                         scales.data() + r);
      for (std::int64_t i = 0; i < k; ++i) q.push_back(static_cast<int>(row[i]) - 128);
      table.arrange_int8_row(row, k, how, sums.data() + r * groups);
    }
  }

  [[nodiscard]] W4A8Gemm gemm(const QuantizedMatrix& weights, std::int64_t row, std::int64_t rows,
                              float* out) const {
    return {.call = {.a = reinterpret_cast<const std::int8_t*>(bytes.data()) + row * stride,
                     .a_stride = stride,
                     .panel = weights.panels.data(),
                     .k = weights.k,
                     .width = weights.n,
                     .out = out,
                     .out_stride = weights.n,
                     .rows = rows},
            .a_scales = scales.data() + row,
            .a_sums = sums.data() + row * groups,
            .quantization = weights.quantization};
  }

  std::int64_t groups;
  std::int64_t stride;
  std::vector<std::uint8_t> bytes;
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
  std::vector<int> q;
};

/// Returns u - zero for W[n, k].
std::vector<int> integers_of(const QuantizedMatrix& weights) {
  const Quantization& how = weights.quantization;
  const std::int64_t size = how.group_size == 0 ? weights.k : how.group_size;
  const std::int64_t groups = group_count(how, weights.k);
  std::vector<int> integers;
  for (std::int64_t n = 0; n < weights.n; ++n) {
    for (std::int64_t i = 0; i < weights.k; ++i) {
      const auto pair =
          static_cast<int>(weights.weights[static_cast<std::size_t>(n * ((weights.k + 1) / 2) + i / 2)]);
      const int bits = (i % 2 == 0 ? pair : pair >> 4) & 15;
      const int zero = weights.zeros[static_cast<std::size_t>(n * groups + i / size)];
      integers.push_back(how.zero_points ? bits - zero : (bits ^ 8) - 8);
    }
  }
  return integers;
}

/// True if the table's multiply-adds are known to round once.
bool fuses(const KernelTable& table) {
  return table.name.starts_with("avx");
}

/// Reference by the definition of W4A8Gemm, with one or two roundings per multiply-add.
float product(const QuantizedMatrix& weights, const std::vector<int>& integers, const Int8Rows& rows,
              std::int64_t row, std::int64_t n, bool rounds_once) {
  const std::int64_t k = weights.k;
  const std::int64_t size = weights.quantization.group_size == 0 ? k : weights.quantization.group_size;
  float total = 0.0F;
  for (std::int64_t group = 0, first = 0; first < k; ++group, first += size) {
    std::int32_t sum = 0;
    for (std::int64_t i = first; i < std::min(first + size, k); ++i) {
      sum += rows.q[static_cast<std::size_t>(row * k + i)] * integers[static_cast<std::size_t>(n * k + i)];
    }
    const auto parts = parts_of_panel(weights.quantization, weights.panels.data(), k, weights.n);
    const float scale = load_as_float(parts.scales, weights.quantization.scale_type,
                                      static_cast<std::size_t>(group * weights.n + n));
    const auto whole = static_cast<float>(sum);
    total = rounds_once ? std::fma(whole, scale, total) : whole * scale + total;
  }
  return total * rows.scales[static_cast<std::size_t>(row)];
}

void check_product(const KernelTable& table, const Quantization& how, std::int64_t rows, std::int64_t width,
                   std::int64_t k, FreshRandom* random) {
  const QuantizedMatrix weights(how, width, k, random);
  const Int8Rows a(table, how, rows, k, random->vector(rows * k, -3.0F, 2.0F));
  const auto integers = integers_of(weights);
  // The last row is not part of the product.
  std::vector<float> out(static_cast<std::size_t>((rows + 1) * width), kPoison);
  table.w4a8_gemm(a.gemm(weights, 0, rows, out.data()));
  for (std::int64_t n = 0; n < width; ++n) {
    BOOST_TEST_REQUIRE(out[static_cast<std::size_t>(rows * width + n)] == kPoison, "rows " << rows);
  }
  const auto is_exact = [&](bool rounds_once) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t n = 0; n < width; ++n) {
        const float found = out[static_cast<std::size_t>(r * width + n)];
        if (found != product(weights, integers, a, r, n, rounds_once)) return false;
      }
    }
    return true;
  };
  BOOST_TEST_REQUIRE((is_exact(true) || (!fuses(table) && is_exact(false))),
                     "rows " << rows << " width " << width << " k " << k);
}

BOOST_AUTO_TEST_SUITE(w4a8_gemm)

BOOST_DATA_TEST_CASE(products_are_those_of_exact_integers,
                     kernel_tables() * data::xrange(std::size(kQuantizations)), name, index) {
  const auto& table = kernel_table(name);
  const Quantization& how = kQuantizations[index];
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    // Inputs of fewer bits are whole words.
    const std::vector<std::int64_t> depths = how.bits == 4 ? std::vector<std::int64_t>{2, 7, 8, 64, 130, 326}
                                                           : std::vector<std::int64_t>{32, 64, 352};
    const auto widths = sanitized<std::vector<std::int64_t>>({1, 17, 64}, {1, 16, 17, 64});
    const auto some_rows = sanitized<std::vector<std::int64_t>>({1, 13}, {1, 2, 5, 13});
    for (const std::int64_t k : depths) {
      for (const std::int64_t width : widths) {
        for (const std::int64_t rows : some_rows) check_product(table, how, rows, width, k, &random);
      }
    }
    // Whole tiles, several ranges of steps, and rows after the last tiles.
    for (const std::int64_t rows :
         kSanitizedPart ? std::vector<std::int64_t>{40} : std::vector<std::int64_t>{15, 16, 40, 67}) {
      check_product(table, how, rows, 64, how.bits == 4 ? 2182 : 2176, &random);
    }
  }
}

BOOST_DATA_TEST_CASE(rows_have_the_bits_alone_that_they_have_among_many_and_in_parts,
                     kernel_tables() * data::xrange(std::size(kQuantizations)), name, index) {
  constexpr std::int64_t kRows = 75;
  const auto& table = kernel_table(name);
  const Quantization& how = kQuantizations[index];
  // Several parts of 512, the last one shorter.
  const std::int64_t k = sanitized(1280, 2304) + (how.bits == 4 ? 6 : 0);
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const QuantizedMatrix weights(how, kPanelColumns, k, &random);
    const Int8Rows a(table, how, kRows, k, random.vector(kRows * k));
    std::vector<float> crowd(static_cast<std::size_t>(kRows * kPanelColumns), kPoison);
    table.w4a8_gemm(a.gemm(weights, 0, kRows, crowd.data()));
    const std::int64_t part = std::lcm(std::int64_t{512}, std::max<std::int64_t>(1, how.group_size));
    for (const std::int64_t count : {1, 2, 7, 16, 33}) {
      for (const bool in_parts : {false, true}) {
        const std::int64_t row = 41 - count / 2;
        std::vector<float> alone(static_cast<std::size_t>(count * kPanelColumns), kPoison);
        W4A8Gemm gemm = a.gemm(weights, row, count, alone.data());
        for (std::int64_t begin = 0; begin < k; begin += in_parts ? part : k) {
          if (in_parts) gemm.call.part = InputRange{begin, std::min(begin + part, k)};
          table.w4a8_gemm(gemm);
        }
        BOOST_TEST_REQUIRE(
            std::memcmp(alone.data(), crowd.data() + row * kPanelColumns, alone.size() * sizeof(float)) == 0,
            "rows " << count << " parts " << in_parts);
      }
    }
  }
}

/// Rows of extreme_sums_do_not_wrap: it checks values, not memory accesses.
const auto kExtremeRows = sanitized<std::vector<int>>({5}, {1, 5, 40});

BOOST_DATA_TEST_CASE(extreme_sums_do_not_wrap, kernel_tables() * data::make(kExtremeRows), name, rows) {
  const auto& table = kernel_table(name);
  const std::int64_t k = kMaxInt8Inputs;
  const Quantization how{.algo = QuantAlgo::kW4A8, .zero_points = true};
  FreshRandom random;
  QuantizedMatrix weights(how, kPanelColumns, k, &random);
  // u - zero is 15 in even columns, and -15 in odd ones.
  for (std::int64_t n = 0; n < weights.n; ++n) {
    std::fill_n(weights.weights.begin() + n * k / 2, k / 2, n % 2 == 0 ? std::byte{0xff} : std::byte{0});
    weights.zeros[static_cast<std::size_t>(n)] = n % 2 == 0 ? 0 : 15;
    weights.scales[static_cast<std::size_t>(n)] = 1.0F;
  }
  weights.pack();
  const Int8Rows a(table, how, rows, k, std::vector<float>(static_cast<std::size_t>(rows * k), 127.0F));
  std::vector<float> out(static_cast<std::size_t>(rows * kPanelColumns));
  table.w4a8_gemm(a.gemm(weights, 0, rows, out.data()));
  for (std::size_t i = 0; i < out.size(); ++i) {
    BOOST_TEST_REQUIRE(out[i] == (i % 2 == 0 ? 1.0F : -1.0F) * 127.0F * 15.0F * 65536.0F);
  }
}

BOOST_DATA_TEST_CASE(a_row_of_no_numbers_spoils_itself_alone, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  const Quantization how{.algo = QuantAlgo::kW4A8, .group_size = 32};
  FreshRandom random;
  const QuantizedMatrix weights(how, kPanelColumns, 64, &random);
  std::vector<float> x(3 * 64, 1.0F);
  x[70] = std::nanf("");
  const Int8Rows a(table, how, 3, 64, x);
  std::vector<float> out(3 * kPanelColumns);
  table.w4a8_gemm(a.gemm(weights, 0, 3, out.data()));
  for (std::size_t i = 0; i < out.size(); ++i) {
    BOOST_TEST_REQUIRE(std::isnan(out[i]) == (i / kPanelColumns == 1));
  }
}

BOOST_DATA_TEST_CASE(rows_are_arranged_as_words_have_their_inputs, kernel_tables() * data::make({2, 3, 4}),
                     name, bits) {
  const auto& table = kernel_table(name);
  const Quantization how{.algo = QuantAlgo::kW4A8, .group_size = 32, .bits = bits};
  constexpr std::int64_t kInputs = 70;
  std::vector<std::uint8_t> row(96, 0x55);
  for (std::int64_t i = 0; i < kInputs; ++i)
    row[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(129 + i);
  std::int32_t sums[3];
  table.arrange_int8_row(row.data(), kInputs, how, sums);
  const auto order = int8_order(bits);
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::size_t input = i / 32 * 32 + order[i % 32];
    BOOST_TEST_REQUIRE(row[i] == (input < kInputs ? input + 1 : 0));
  }
  BOOST_TEST((sums[0] == 32 * 33 / 2 && sums[1] == 64 * 65 / 2 - 32 * 33 / 2 &&
              sums[2] == 70 * 71 / 2 - 64 * 65 / 2));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::w4a8_gemm_test
