// Integers of 2 and 3 bits give the same products as in panels of 4 bits.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"
#include "quantized_matrix.h"
#include "support/sanitized.h"

namespace adaptrt::narrow_gemm_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kActivations[] = {DType::kFloat32, DType::kBFloat16};

/// Integers W[n, k] of `bits` bits, in panels of that width and of 4 bits.
struct Matrices {
  Matrices(std::int32_t bits, bool zero_points, std::int64_t group_size, std::int64_t outputs,
           std::int64_t inputs, FreshRandom* random)
      : narrow({.algo = QuantAlgo::kW4A16,
                .group_size = group_size,
                .zero_points = zero_points,
                .scale_type = DType::kFloat16,
                .bits = bits},
               outputs, inputs, random),
        four(of_four_bits(narrow)) {}

  static QuantizedMatrix of_four_bits(const QuantizedMatrix& matrix) {
    QuantizedMatrix made = matrix;
    made.quantization.bits = 4;
    made.pack();
    return made;
  }

  QuantizedMatrix narrow;
  QuantizedMatrix four;
};

/// Activation rows, and the arrays that products need of them.
struct Rows {
  Rows(const KernelTable& table, DType activation_type, const QuantizedMatrix& matrix, std::int64_t count,
       FreshRandom* random)
      : activation(activation_type),
        rows(count),
        k(matrix.k),
        a(static_cast<std::size_t>(rows * k) * size_of(activation)),
        sums(static_cast<std::size_t>(rows * group_count(matrix.quantization, k))) {
    for (std::int64_t i = 0; i < rows * k; ++i) {
      store_from_float(a.data(), activation, static_cast<std::size_t>(i), random->between(-1.0F, 1.0F));
    }
    const std::int64_t groups = group_count(matrix.quantization, k);
    for (std::int64_t row = 0; row < rows; ++row) {
      table.sum_groups(a.data() + static_cast<std::size_t>(row * k) * size_of(activation), activation, k,
                       matrix.quantization.group_size, sums.data() + row * groups);
    }
  }

  [[nodiscard]] QuantizedGemm gemm(const QuantizedMatrix& matrix, float* out) const {
    return {.call = {.a = a.data(),
                     .a_stride = k,
                     .panel = matrix.panels.data(),
                     .k = k,
                     .width = matrix.n,
                     .out = out,
                     .out_stride = matrix.n,
                     .rows = rows},
            .activation = activation,
            .a_sums = sums.data(),
            .quantization = matrix.quantization};
  }

  DType activation;
  std::int64_t rows;
  std::int64_t k;
  std::vector<std::byte> a;
  std::vector<float> sums;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

const std::vector<std::int64_t> kWidths =
    kSanitizedPart ? std::vector<std::int64_t>{7, 40, 61} : std::vector<std::int64_t>{1, 7, 16, 40, 61, 64};
const std::vector<std::int64_t> kCounts = kSanitizedPart
                                              ? std::vector<std::int64_t>{1, 3, 7, 40}
                                              : std::vector<std::int64_t>{1, 2, 3, 4, 6, 7, 13, 40};

BOOST_AUTO_TEST_SUITE(narrow_gemm)

BOOST_DATA_TEST_CASE(fewer_bits_hold_the_same_weights_in_fewer_bytes, data::make({2, 3}) * data::make({0, 1}),
                     bits, zero_points) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {1, 61, 64, 130}) {
      const Matrices matrices(bits, zero_points != 0, 32, width, 192, &random);
      BOOST_TEST(matrices.narrow.values() == matrices.four.values(), boost::test_tools::per_element());
      const auto saved = static_cast<std::size_t>(width * 192 * (4 - bits) / 8);
      BOOST_TEST(matrices.narrow.panels.size() == matrices.four.panels.size() - saved);
    }
  }
}

BOOST_DATA_TEST_CASE(products_have_the_bits_of_those_of_four,
                     kernel_tables() * data::make({2, 3}) * data::make({0, 1}) * data::make({0, 1}), name,
                     bits, zero_points, activation_index) {
  const auto& table = kernel_table(name);
  const auto activation = static_cast<std::size_t>(kActivations[activation_index]);
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t group_size : {0, 32, 128, 1024}) {
      for (const std::int64_t width : kWidths) {
        const std::int64_t k = group_size == 1024 ? 1120 : 288;
        const Matrices matrices(bits, zero_points != 0, group_size, width, k, &random);
        for (const std::int64_t count : kCounts) {
          const Rows rows(table, kActivations[activation_index], matrices.narrow, count, &random);
          std::vector<float> expected(static_cast<std::size_t>(count * width), kPoison);
          multiply(table, rows.gemm(matrices.four, expected.data()));
          for (const bool expands : {false, true}) {
            std::vector<float> out(expected.size(), kPoison);
            auto gemm = rows.gemm(matrices.narrow, out.data());
            std::vector<std::byte> panel(panel_bytes(kActivations[activation_index], width, k));
            table.expand_panel[activation](gemm, panel.data());
            if (expands) gemm.expanded = panel.data();
            multiply(table, gemm);
            BOOST_TEST_REQUIRE(same_bits(out, expected), "group_size " << group_size << " width " << width
                                                                       << " rows " << count << " expanded "
                                                                       << expands);
          }
        }
      }
    }
  }
}

// Tile kernels split long inputs into parts.
BOOST_DATA_TEST_CASE(products_are_the_same_in_parts,
                     kernel_tables() * data::make({2, 3}) * data::make({0, 64}), name, bits, group_size) {
  const auto& table = kernel_table(name);
  if (table.part_bytes == 0) return;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    constexpr std::int64_t kInputs = 2080, kPart = 512;
    const Matrices matrices(bits, true, group_size, kPanelColumns, kInputs, &random);
    for (const std::int64_t count : {1, 3, 7, 40}) {
      const Rows rows(table, DType::kBFloat16, matrices.narrow, count, &random);
      std::vector<float> whole(static_cast<std::size_t>(count * kPanelColumns), kPoison);
      auto in_parts = whole;
      multiply(table, rows.gemm(matrices.four, whole.data()));
      auto gemm = rows.gemm(matrices.narrow, in_parts.data());
      for (std::int64_t begin = 0; begin < kInputs; begin += kPart) {
        gemm.call.part = InputRange{begin, std::min(begin + kPart, kInputs)};
        multiply(table, gemm);
      }
      BOOST_TEST_REQUIRE(same_bits(in_parts, whole), "rows " << count);
    }
  }
}

BOOST_AUTO_TEST_CASE(integers_of_more_bits_are_refused) {
  constexpr std::int64_t kInputs = 32;
  const float scale = 1.0F;
  const std::uint8_t zero = 1;
  const auto pack = [&](std::int32_t bits, bool zero_points, unsigned nibble) {
    const Quantization how{.algo = QuantAlgo::kW4A16, .zero_points = zero_points, .bits = bits};
    std::vector<std::byte> weights(kInputs / 2);
    weights[7] = static_cast<std::byte>(nibble << 4);
    std::vector<std::byte> panels(panel_bytes(how, DType::kFloat32, 1, kInputs));
    pack_quantized_panels(panels.data(), how, 1, kInputs, 0, 1,
                          {weights.data(), &scale, zero_points ? &zero : nullptr});
  };
  const auto is_refused = [&](std::int32_t bits, bool zero_points, unsigned nibble,
                              const std::string& reason) {
    BOOST_CHECK_EXCEPTION(pack(bits, zero_points, nibble), CheckpointError,
                          [&](const CheckpointError& error) { return error.what() == reason; });
  };
  pack(2, true, 3);
  is_refused(2, true, 4, "a weight of 2 bits is 4; it must be 0 to 3");
  pack(3, true, 7);
  is_refused(3, true, 8, "a weight of 3 bits is 8; it must be 0 to 7");
  pack(2, false, 1);
  pack(2, false, 14);
  is_refused(2, false, 2, "a weight of 2 bits is 2; it must be -2 to 1");
  is_refused(2, false, 13, "a weight of 2 bits is -3; it must be -2 to 1");
  pack(3, false, 12);
  is_refused(3, false, 4, "a weight of 3 bits is 4; it must be -4 to 3");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::narrow_gemm_test
