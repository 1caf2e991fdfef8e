#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"

namespace adaptrt::compressed_matrix_gemm_test {
namespace {

/// Outputs of matrices: narrow panels, whole vectors and others, and a second panel.
constexpr std::int64_t kOutputs[] = {16, 24, 32, 40, 48, 64, 80, 128};
/// Inputs with whole and partial pieces, and odd ones.
constexpr std::int64_t kInputs[] = {16, 18, 33, 136, 390};
constexpr std::int64_t kRows[] = {1, 2, 3, 6, 7, 20};

/// A bfloat16 matrix in panels, and its compressed form.
struct MatrixCase {
  MatrixCase(std::int64_t outputs, std::int64_t inputs, int others_per_mille, std::mt19937* random)
      : n(outputs), k(inputs) {
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(n * k));
    for (auto& element : bits) {
      const auto any = static_cast<std::uint32_t>((*random)());
      const bool is_other = static_cast<int>((any >> 16U) % 1000) < others_per_mille;
      const std::uint32_t exponent = is_other ? 50 + (any >> 8U) % 128 : 116 + (any >> 8U) % 16;
      element = static_cast<std::uint16_t>((any & 0x807fU) | exponent << 7U);
    }
    panels.resize(panel_bytes(DType::kBFloat16, n, k));
    pack_panels(panels.data(), DType::kBFloat16, n, k, 0, n, reinterpret_cast<const std::byte*>(bits.data()),
                DType::kBFloat16, k);
    compressed.resize(panels.size());
    is_compressed = compress_matrix(panels.data(), n, k, compressed.data()) > 0;
  }

  std::int64_t n;
  std::int64_t k;
  std::vector<std::byte> panels;
  std::vector<std::byte> compressed;
  bool is_compressed;
};

BOOST_AUTO_TEST_SUITE(compressed_matrix_gemm)

BOOST_DATA_TEST_CASE(products_have_the_bits_of_the_panels,
                     kernel_tables() * boost::unit_test::data::make({0, 5, 30}), name, others) {
  const auto& table = kernel_table(name);
  const auto gemm_of_panels = table.gemm[static_cast<std::size_t>(DType::kBFloat16)];
  const std::uint32_t seed = std::random_device{}();
  std::int64_t cases = 0;
  BOOST_TEST_CONTEXT("seed " << seed) {
    std::mt19937 random(seed);
    for (const std::int64_t n : kOutputs) {
      for (const std::int64_t k : kInputs) {
        const MatrixCase test(n, k, others, &random);
        if (!test.is_compressed) continue;
        for (std::int64_t panel = 0; panel < panel_count(n); ++panel) {
          const MatrixPanel compressed = find_matrix_panel(test.compressed.data(), n, k, panel);
          const std::byte* next = panel % 2 == 0 ? compressed.pieces : nullptr;
          const std::byte* plain = test.panels.data() + panel_offset(DType::kBFloat16, k, panel);
          const std::int64_t width = panel_width(n, panel);
          std::vector<std::byte> expanded(
              static_cast<std::size_t>(compressed.num_pieces * kPiecePanelBytes) + 1, std::byte{0xab});
          table.expand_matrix_panel(compressed, next, expanded.data());
          BOOST_TEST_REQUIRE(
              std::memcmp(expanded.data(), plain, panel_bytes(DType::kBFloat16, width, k)) == 0,
              "n " << n << " k " << k << " panel " << panel);
          BOOST_TEST((expanded.back() == std::byte{0xab}));
          ++cases;
          if (table.matrix_panel_gemm == nullptr) continue;
          for (const std::int64_t rows : kRows) {
            for (const bool accumulate : {false, true}) {
              const std::int64_t a_stride = k + 2;
              std::vector<std::uint16_t> a(static_cast<std::size_t>(rows * a_stride));
              for (auto& element : a) {
                element = float_to_bfloat16(std::uniform_real_distribution<float>(-1.0F, 1.0F)(random));
              }
              const std::int64_t out_stride = kPanelColumns + 1;
              std::vector<float> expected(static_cast<std::size_t>(rows * out_stride), kPoison);
              auto out = expected;
              PanelGemm gemm{.call = {.a = a.data(),
                                      .a_stride = a_stride,
                                      .panel = plain,
                                      .k = k,
                                      .width = width,
                                      .out = expected.data(),
                                      .out_stride = out_stride,
                                      .rows = rows},
                             .accumulate = accumulate};
              gemm_of_panels(gemm);
              gemm.call.panel = nullptr;
              gemm.call.next_panel = next;
              gemm.call.out = out.data();
              if (!table.matrix_panel_gemm(gemm, compressed)) {
                // Nothing was computed.
                BOOST_TEST(std::ranges::count(out, kPoison) == std::ssize(out));
                continue;
              }
              const auto check = [&](const char* form) {
                BOOST_TEST_REQUIRE(
                    std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0,
                    "n " << n << " k " << k << " rows " << rows << " add " << accumulate << form);
              };
              check("");
              if (table.pack_rows == nullptr) continue;
              const std::int64_t step_bytes = 3 * PackedSteps::kBlockRows * PackedSteps::kRowBytes;
              std::vector<std::byte> steps(
                  static_cast<std::size_t>(PackedSteps::steps_of(k * 2) * step_bytes));
              table.pack_rows({reinterpret_cast<const std::byte*>(a.data()), a_stride * 2, k * 2}, rows,
                              steps.data(), step_bytes);
              gemm.call.a = nullptr;
              gemm.a_steps = steps.data();
              gemm.a_step_bytes = step_bytes;
              std::ranges::fill(out, kPoison);
              BOOST_TEST(table.matrix_panel_gemm(gemm, compressed));
              check(" packed");
            }
          }
        }
      }
    }
  }
  BOOST_TEST(cases > 20);
}

BOOST_DATA_TEST_CASE(added_products_have_the_bits_of_products,
                     kernel_tables() * boost::unit_test::data::make({0, 5}), name, others) {
  const auto& table = kernel_table(name);
  if (table.add_products == nullptr) return;
  const std::uint32_t seed = std::random_device{}();
  std::mt19937 random(seed);
  constexpr std::int64_t kPanels = 3;
  BOOST_TEST_CONTEXT("seed " << seed) {
    for (const std::int64_t k : {1, 2, 8, 15, 16, 32, 33, 64, 70}) {
      const MatrixCase test(kPanels * kPanelColumns, k, others, &random);
      for (const std::int64_t rows : {1, 2, 3, 4, 5, 17}) {
        const std::int64_t a_stride = k + 3;
        std::vector<std::uint16_t> a(static_cast<std::size_t>(kPanels * rows * a_stride));
        for (std::size_t i = 0; i < a.size(); ++i) {
          // Some products are subnormal. Elements after a row must not be read.
          const float scale = random() % 4 == 0 ? 1e-36F : 1.0F;
          const bool is_input = static_cast<std::int64_t>(i) % a_stride < k;
          const float value = std::uniform_real_distribution<float>(-1.0F, 1.0F)(random);
          a[i] = float_to_bfloat16(is_input ? scale * value : std::numeric_limits<float>::quiet_NaN());
        }
        std::vector<float> sums(static_cast<std::size_t>(kPanels * rows * kPanelColumns));
        // No sum is -0, whose sign would depend on whether rows are multiplied in tiles.
        for (float& sum : sums) {
          sum = random() % 4 == 0 ? 0.0F : std::normal_distribution<float>()(random);
        }
        auto expected = sums;
        std::vector<AddedProduct> products;
        std::vector<MatrixPanel> compressed(kPanels);
        for (std::int64_t panel = 0; panel < kPanels; ++panel) {
          const std::byte* plain = test.panels.data() + panel_offset(DType::kBFloat16, k, panel);
          const std::uint16_t* rows_of_a = a.data() + panel * rows * a_stride;
          const std::int64_t first_sum = panel * rows * kPanelColumns;
          table.gemm[static_cast<std::size_t>(DType::kBFloat16)]({.call = {.a = rows_of_a,
                                                                           .a_stride = a_stride,
                                                                           .panel = plain,
                                                                           .k = k,
                                                                           .width = kPanelColumns,
                                                                           .out = expected.data() + first_sum,
                                                                           .out_stride = kPanelColumns,
                                                                           .rows = rows},
                                                                  .accumulate = true});
          products.push_back({.a = reinterpret_cast<const std::byte*>(rows_of_a),
                              .a_stride = a_stride * 2,
                              .panel = plain,
                              .k = k,
                              .out = sums.data() + first_sum,
                              .rows = rows});
        }
        auto sums_of_compressed = sums;
        table.add_products(products);
        const auto check = [&](const std::vector<float>& found, const char* form) {
          BOOST_TEST_REQUIRE(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0,
                             "k " << k << " rows " << rows << form);
        };
        check(sums, " exact");
        if (!test.is_compressed) continue;
        for (std::size_t i = 0; i < products.size(); ++i) {
          const auto panel = static_cast<std::int64_t>(i);
          compressed[i] = find_matrix_panel(test.compressed.data(), kPanels * kPanelColumns, k, panel);
          products[i].panel = nullptr;
          products[i].compressed = &compressed[i];
          products[i].out = sums_of_compressed.data() + panel * rows * kPanelColumns;
        }
        table.add_products(products);
        check(sums_of_compressed, " compressed");
      }
    }
  }
}

BOOST_DATA_TEST_CASE(few_rows_need_no_expanded_panel, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  if (table.matrix_panel_gemm == nullptr) return;
  std::mt19937 random(1);
  const MatrixCase test(64, 64, 0, &random);
  const std::vector<std::uint16_t> a(64 * 8);
  std::vector<float> out(64 * 8);
  const auto runs = [&](std::int64_t width, std::int64_t rows) {
    return table.matrix_panel_gemm({.call = {.a = a.data(),
                                             .a_stride = 64,
                                             .k = 64,
                                             .width = width,
                                             .out = out.data(),
                                             .out_stride = 64,
                                             .rows = rows}},
                                   find_matrix_panel(test.compressed.data(), 64, 64, 0));
  };
  const std::int64_t most = table.pack_rows != nullptr ? table.few_rows : 6;
  BOOST_TEST(runs(64, 1));
  BOOST_TEST(runs(64, most));
  BOOST_TEST(!runs(64, most + 1));
  BOOST_TEST(runs(32, 1));
  BOOST_TEST(runs(16, 1));
  BOOST_TEST(runs(24, 1));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::compressed_matrix_gemm_test
