#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <random>
#include <vector>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"

namespace adaptrt::compressed_gemm_test {
namespace {

/// Includes more than one part of k, and a partial part.
constexpr std::int64_t kInputs[] = {8, 128, 136, 392, 1064};

/// Numbers of rows for different kernel paths; those that a table does not multiply compressed are skipped.
constexpr std::int64_t kRows[] = {1,  2,  3,  4,  5,  6,  7,  12, 13,  15, 16,
                                  17, 18, 23, 24, 32, 33, 48, 70, 128, 150};

/// A bfloat16 panel, and its compressed form with room for one more exception than it has.
struct CompressedCase {
  CompressedCase(std::int64_t depth, int others_per_mille, std::mt19937* random) : k(depth) {
    panel.resize(static_cast<std::size_t>(k * kPanelColumns));
    for (auto& element : panel) {
      const auto any = static_cast<std::uint32_t>((*random)());
      const bool is_other = static_cast<int>((any >> 16U) % 1000) < others_per_mille;
      // The exponent is drawn from 2^-77 to 2^50, or from the eight most frequent upper bytes.
      const std::uint32_t exponent = is_other ? 50 + (any >> 8U) % 128 : 116 + (any >> 8U) % 16;
      element = static_cast<std::uint16_t>((any & 0x807fU) | exponent << 7U);
    }
    const auto* bytes = reinterpret_cast<const std::byte*>(panel.data());
    outliers = count_outliers(bytes, k) + 1;
    compressed.resize(compressed_panel_bytes(k, outliers));
    compress_panel(bytes, k, outliers, compressed.data());
  }

  std::int64_t k;
  std::int64_t outliers;
  std::vector<std::uint16_t> panel;
  std::vector<std::byte> compressed;
};

std::vector<std::uint16_t> random_activations(std::int64_t size, std::mt19937* random) {
  std::vector<std::uint16_t> a(static_cast<std::size_t>(size));
  for (auto& element : a) {
    element = float_to_bfloat16(std::uniform_real_distribution<float>(-1.0F, 1.0F)(*random));
  }
  return a;
}

/// Computes the product from only the packed rows, one part of the inputs after another.
void multiply_packed_in_parts(const KernelTable& table, PanelGemm gemm, std::int64_t outliers) {
  constexpr std::int64_t kPart = 512;
  const std::int64_t blocks = gemm.call.rows / PackedSteps::kBlockRows + 1;
  gemm.a_step_bytes = blocks * PackedSteps::kBlockRows * PackedSteps::kRowBytes;
  const std::int64_t steps = gemm.call.k * 2 / PackedSteps::kRowBytes + 1;
  std::vector<std::byte> packed(static_cast<std::size_t>(steps * gemm.a_step_bytes));
  table.pack_rows({static_cast<const std::byte*>(gemm.call.a), gemm.call.a_stride * 2, gemm.call.k * 2},
                  gemm.call.rows, packed.data(), gemm.a_step_bytes);
  gemm.call.a = nullptr;
  gemm.a_steps = packed.data();
  for (std::int64_t begin = 0; begin < gemm.call.k; begin += kPart) {
    gemm.call.part = InputRange{begin, std::min(begin + kPart, gemm.call.k)};
    table.compressed_gemm(gemm, outliers);
  }
}

BOOST_AUTO_TEST_SUITE(compressed_gemm)

BOOST_DATA_TEST_CASE(expanding_gives_the_panel, kernel_tables() * boost::unit_test::data::make({0, 5, 300}),
                     name, others) {
  const auto& table = kernel_table(name);
  const std::uint32_t seed = std::random_device{}();
  BOOST_TEST_CONTEXT("seed " << seed) {
    std::mt19937 random(seed);
    for (const std::int64_t k : kInputs) {
      const CompressedCase test(k, others, &random);
      std::vector<std::uint16_t> out(test.panel.size() + 1, 0xabcd);
      table.expand_compressed(test.compressed.data(), k, test.outliers,
                              reinterpret_cast<std::byte*>(out.data()));
      BOOST_TEST(std::memcmp(out.data(), test.panel.data(), 2 * test.panel.size()) == 0);
      BOOST_TEST(out.back() == 0xabcd);
    }
  }
}

BOOST_DATA_TEST_CASE(products_have_the_bits_of_the_panel_they_stand_for,
                     kernel_tables() * boost::unit_test::data::make({0, 5, 300}), name, others) {
  const auto& table = kernel_table(name);
  const std::uint32_t seed = std::random_device{}();
  BOOST_TEST((table.compressed_gemm == nullptr) == (table.compressed_rows == 0));
  BOOST_TEST_CONTEXT("seed " << seed) {
    std::mt19937 random(seed);
    for (const std::int64_t k : kInputs) {
      const CompressedCase test(k, others, &random);
      const CompressedCase following(k, others, &random);
      const std::vector<std::byte> adapter(1000);
      const MemorySpan spans[] = {{adapter.data(), 1000}, {adapter.data(), 1}};
      for (const std::int64_t rows : kRows) {
        if (rows > table.compressed_rows) break;
        const std::int64_t a_stride = k + 2;
        const auto a = random_activations(rows * a_stride, &random);
        const std::int64_t out_stride = kPanelColumns + 1;
        // The last row is not part of the product.
        std::vector<float> expected(static_cast<std::size_t>((rows + 1) * out_stride), kPoison);
        auto out = expected;
        PanelGemm gemm{.call = {.a = a.data(),
                                .a_stride = a_stride,
                                .panel = reinterpret_cast<const std::byte*>(test.panel.data()),
                                .k = k,
                                .width = kPanelColumns,
                                .out = expected.data(),
                                .out_stride = out_stride,
                                .rows = rows}};
        table.gemm[static_cast<std::size_t>(DType::kBFloat16)](gemm);
        gemm.call.panel = test.compressed.data();
        gemm.call.out = out.data();
        if (rows % 2 == 0) gemm.call.next_panel = following.compressed.data();
        if (rows % 3 == 0) gemm.fetch = spans;
        table.compressed_gemm(gemm, test.outliers);
        BOOST_TEST_REQUIRE(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0,
                           "rows " << rows << " k " << k);
        if (table.pack_rows == nullptr) continue;
        std::ranges::fill(out, kPoison);
        multiply_packed_in_parts(table, gemm, test.outliers);
        BOOST_TEST_REQUIRE(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0,
                           "packed, rows " << rows << " k " << k);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(damaged_panels_write_nothing_outside, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  const std::uint32_t seed = std::random_device{}();
  BOOST_TEST_CONTEXT("seed " << seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < 50; ++round) {
      CompressedCase test(136, 300, &random);
      for (auto& byte : test.compressed) {
        if (random() % 3 == 0) byte = static_cast<std::byte>(random());
      }
      std::vector<std::uint16_t> out(test.panel.size() + 1, 0xabcd);
      table.expand_compressed(test.compressed.data(), test.k, test.outliers,
                              reinterpret_cast<std::byte*>(out.data()));
      BOOST_TEST(out.back() == 0xabcd);
      if (table.compressed_rows == 0) continue;
      const auto a = random_activations(test.k, &random);
      std::vector<float> sums(kPanelColumns + 1, kPoison);
      table.compressed_gemm({.call = {.a = a.data(),
                                      .a_stride = test.k,
                                      .panel = test.compressed.data(),
                                      .k = test.k,
                                      .width = kPanelColumns,
                                      .out = sums.data(),
                                      .out_stride = kPanelColumns,
                                      .rows = 1}},
                            test.outliers);
      BOOST_TEST(sums.back() == kPoison);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::compressed_gemm_test
