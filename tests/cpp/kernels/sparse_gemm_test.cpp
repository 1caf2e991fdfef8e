#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"
#include "support/sanitized.h"

namespace adaptrt::sparse_gemm_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

DType activation_of(DType weights) {
  return weights == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
}

std::vector<std::byte> elements(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> made(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) store_from_float(made.data(), dtype, i, values[i]);
  return made;
}

/// Packs W[kPanelColumns, k] of these values as a panel.
std::vector<std::byte> panel_of(DType dtype, std::int64_t k, const std::vector<float>& values) {
  std::vector<std::byte> panel(panel_bytes(dtype, kPanelColumns, k));
  pack_panels(panel.data(), dtype, kPanelColumns, k, 0, kPanelColumns,
              reinterpret_cast<const std::byte*>(values.data()), DType::kFloat32, k);
  return panel;
}

/// Returns pointers to kPanelColumns outputs, of which the first `count` are wanted, in random order of
/// addresses.
std::vector<const std::byte*> point_at(const std::vector<std::byte>& outputs, std::int64_t count) {
  const std::size_t bytes = outputs.size() / kPanelColumns;
  std::vector<const std::byte*> pointers;
  for (std::int64_t i = 0; i < kPanelColumns; ++i) {
    pointers.push_back(outputs.data() + static_cast<std::size_t>(std::min(i, count - 1) * 27 % 64) * bytes);
  }
  return pointers;
}

/// Returns the values of the pointers of point_at, with zeros after the wanted ones.
std::vector<float> values_of(const std::vector<float>& values, std::int64_t k, std::int64_t count) {
  std::vector<float> gathered(values.size());
  for (std::int64_t i = 0; i < count; ++i)
    std::copy_n(values.begin() + i * 27 % 64 * k, k, gathered.begin() + i * k);
  return gathered;
}

/// Rows of inputs of which a share is not zero. Zeros have either sign, and some other values are so small
/// that products vanish.
std::vector<float> sparse_inputs(std::int64_t count, float share, FreshRandom* random) {
  auto inputs = random->vector(count);
  for (float& input : inputs) {
    const float drawn = random->between(0.0F, 1.0F);
    if (drawn > share) input = drawn > 0.9F ? -0.0F : 0.0F;
    if (drawn < share / 10) input *= 1e-25F;
  }
  return inputs;
}

/// Returns the groups of `size` of a row's k inputs that are not all zero in some row.
std::vector<std::int32_t> live_groups(const std::vector<float>& inputs, std::int64_t rows,
                                      std::int64_t stride, std::int64_t k, std::int64_t size) {
  std::vector<std::int32_t> groups;
  for (std::int64_t group = 0; group * size < k; ++group) {
    bool is_live = false;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = group * size; i < std::min(k, (group + 1) * size); ++i) {
        is_live |= inputs[static_cast<std::size_t>(row * stride + i)] != 0.0F;
      }
    }
    if (is_live) groups.push_back(static_cast<std::int32_t>(group));
  }
  return groups;
}

/// Some of them are so small that products vanish.
std::vector<float> weights_with_small_ones(std::int64_t count, FreshRandom* random) {
  auto values = random->vector(count);
  for (std::size_t i = 0; i < values.size(); i += 7) values[i] *= 1e-30F;
  return values;
}

/// True if equal, with +0 equal to -0.
bool are_same(float one, float other) {
  one += 0.0F;
  other += 0.0F;
  return std::memcmp(&one, &other, sizeof(float)) == 0;
}

BOOST_AUTO_TEST_SUITE(sparse_gemm)

BOOST_DATA_TEST_CASE(gathered_outputs_are_a_panel, kernel_tables() * data::make({0, 2}), name, type) {
  const auto& table = kernel_table(name);
  const DType dtype = kDTypes[type];
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : {2, 6, 8, 34, 130, 400}) {
      const auto values = random.vector(kPanelColumns * k);
      const auto outputs = elements(dtype, values);
      const std::int64_t words = k / k_interleave(dtype);
      for (const std::int64_t count : {1, 3, 16, 47, 48, 49, 64}) {
        const auto expected = panel_of(dtype, k, values_of(values, k, count));
        const auto pointers = point_at(outputs, count);
        std::vector<std::byte> made(expected.size() + 1, std::byte{0xab});
        table.gather_outputs({pointers.data(), count, pointers.data()}, words, made.data());
        // Columns after the wanted ones are other outputs, or zeros.
        for (std::int64_t word = 0; word < words; ++word) {
          const std::size_t at = static_cast<std::size_t>(word * kPanelColumns * 4);
          BOOST_TEST_REQUIRE(
              std::memcmp(made.data() + at, expected.data() + at, static_cast<std::size_t>(count) * 4) == 0,
              "k " << k << " count " << count << " word " << word);
        }
        BOOST_TEST((made.back() == std::byte{0xab}));
      }
    }
  }
}

BOOST_DATA_TEST_CASE(gathered_products_have_the_bits_of_the_panel, kernel_tables() * data::make({0, 2}), name,
                     type) {
  const auto& table = kernel_table(name);
  const DType dtype = kDTypes[type];
  const auto gathered_gemm = table.gathered_gemm[static_cast<std::size_t>(type)];
  if (gathered_gemm == nullptr) return;
  const DType activation = activation_of(dtype);
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : {2, 34, 128, 130, 400}) {
      const auto values = random.vector(kPanelColumns * k);
      const auto outputs = elements(dtype, values);
      for (std::int64_t rows = 1; rows <= table.sparse_rows[static_cast<std::size_t>(type)]; ++rows) {
        const std::int64_t stride = k + 2;
        const auto a = elements(activation, random.vector(rows * stride));
        for (const std::int64_t count : {1, 20, 64}) {
          const auto panel = panel_of(dtype, k, values_of(values, k, count));
          const auto pointers = point_at(outputs, count);
          std::vector<float> expected(static_cast<std::size_t>(rows * 65), kPoison);
          auto out = expected;
          PanelGemm gemm{.call = {.a = a.data(),
                                  .a_stride = stride,
                                  .panel = panel.data(),
                                  .k = k,
                                  .width = kPanelColumns,
                                  .out = expected.data(),
                                  .out_stride = 65,
                                  .rows = rows}};
          table.gemm[static_cast<std::size_t>(type)](gemm);
          gemm.call.panel = nullptr;
          gemm.call.out = out.data();
          gathered_gemm(gemm, {pointers.data(), count, nullptr});
          for (std::int64_t row = 0; row < rows; ++row) {
            const auto at = static_cast<std::size_t>(row * 65);
            BOOST_TEST_REQUIRE(
                std::memcmp(out.data() + at, expected.data() + at, static_cast<std::size_t>(count) * 4) == 0,
                "k " << k << " rows " << rows << " count " << count);
            BOOST_TEST(out[at + 64] == kPoison);
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(sparse_products_have_the_bits_of_dense_ones, kernel_tables() * data::make({0, 1, 2}),
                     name, type) {
  const auto& table = kernel_table(name);
  const auto index = static_cast<std::size_t>(type);
  const DType dtype = kDTypes[type];
  const DType activation = activation_of(dtype);
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : {1, 2, 33, 64, 191, 400}) {
      const auto panel = panel_of(dtype, k, weights_with_small_ones(kPanelColumns * k, &random));
      for (std::int64_t rows = 1; rows <= table.sparse_rows[index]; ++rows) {
        for (const float share : {0.0F, 0.05F, 0.4F, 1.0F}) {
          const std::int64_t stride = k + 3;
          const auto inputs = sparse_inputs(rows * stride, share, &random);
          const auto groups = live_groups(inputs, rows, stride, k, k_interleave(dtype));
          const auto a = elements(activation, inputs);
          std::vector<float> expected(static_cast<std::size_t>(rows * 65), kPoison);
          auto out = expected;
          PanelGemm gemm{.call = {.a = a.data(),
                                  .a_stride = stride,
                                  .panel = panel.data(),
                                  .k = k,
                                  .width = kPanelColumns,
                                  .out = expected.data(),
                                  .out_stride = 65,
                                  .rows = rows}};
          table.gemm[index](gemm);
          gemm.call.out = out.data();
          gemm.call.next_panel = panel.data();
          table.sparse_gemm[index](gemm, {groups.data(), static_cast<std::int64_t>(groups.size())});
          for (std::size_t i = 0; i < out.size(); ++i) {
            BOOST_TEST_REQUIRE(are_same(out[i], expected[i]), "k " << k << " rows " << rows << " share "
                                                                   << share << ": " << out[i] << " and "
                                                                   << expected[i]);
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(products_of_columns_have_the_bits_of_panels, kernel_tables() * data::make({0, 1, 2}),
                     name, type) {
  const auto& table = kernel_table(name);
  const auto index = static_cast<std::size_t>(type);
  const DType dtype = kDTypes[type];
  const auto inputs_of_panels =
      sanitized<std::vector<std::int64_t>>({1, 2, 33, 191}, {1, 2, 33, 64, 191, 400});
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t k : inputs_of_panels) {
      constexpr std::int64_t kPanels = 5;
      constexpr std::int64_t kOutputs = kPanels * kPanelColumns;
      std::vector<std::vector<std::byte>> panels;
      std::vector<std::vector<std::byte>> columns;
      std::vector<float> transposed(static_cast<std::size_t>(k * kOutputs));
      for (std::int64_t panel = 0; panel < kPanels; ++panel) {
        const auto values = weights_with_small_ones(kPanelColumns * k, &random);
        panels.push_back(panel_of(dtype, k, values));
        for (std::int64_t i = 0; i < std::ssize(values); ++i) {
          transposed[static_cast<std::size_t>(i % k * kOutputs + panel * kPanelColumns + i / k)] =
              values[static_cast<std::size_t>(i)];
        }
      }
      // Each column has its own memory, up to its last byte.
      for (std::int64_t i = 0; i < k; ++i) {
        const auto* first = transposed.data() + i * kOutputs;
        columns.push_back(elements(dtype, {first, first + kOutputs}));
      }
      for (std::int64_t rows = 1; rows <= table.sparse_rows[index]; ++rows) {
        for (const float share : {0.0F, 0.05F, 0.4F, 1.0F}) {
          const std::int64_t stride = k + 3;
          const auto inputs = sparse_inputs(rows * stride, share, &random);
          const auto a = elements(activation_of(dtype), inputs);
          const auto live = live_groups(inputs, rows, stride, k, 1);
          std::vector<const std::byte*> pointers;
          for (const std::int32_t input : live)
            pointers.push_back(columns[static_cast<std::size_t>(input)].data());
          for (const auto& [first, last] : {std::pair{0, 1}, {2, 5}, {0, 5}}) {
            const auto tile = static_cast<std::size_t>(rows * kPanelColumns);
            std::vector<float> out(static_cast<std::size_t>(last - first) * tile + 1, kPoison);
            table.column_gemm[index]({.a = a.data(),
                                      .a_stride = stride,
                                      .k = k,
                                      .live = {live.data(), pointers.data(), std::ssize(live)},
                                      .first = first * kPanelColumns,
                                      .width = (last - first) * kPanelColumns,
                                      .out = out.data(),
                                      .rows = rows});
            BOOST_TEST(out.back() == kPoison);
            for (int panel = first; panel < last; ++panel) {
              std::vector<float> expected(tile);
              table.gemm[index]({.call = {.a = a.data(),
                                          .a_stride = stride,
                                          .panel = panels[static_cast<std::size_t>(panel)].data(),
                                          .k = k,
                                          .width = kPanelColumns,
                                          .out = expected.data(),
                                          .out_stride = kPanelColumns,
                                          .rows = rows}});
              const float* found = out.data() + static_cast<std::size_t>(panel - first) * tile;
              for (std::size_t i = 0; i < tile; ++i) {
                BOOST_TEST_REQUIRE(are_same(found[i], expected[i]),
                                   "k " << k << " rows " << rows << " share " << share << " panel " << panel
                                        << ": " << found[i] << " and " << expected[i]);
              }
            }
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(a_closed_gate_gives_a_positive_zero, kernel_tables() * data::make({0, 1, 2}), name,
                     type) {
  const auto& table = kernel_table(name);
  const DType dtype = kDTypes[type];
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr std::int64_t kWidth = 21;
  constexpr float kThreshold = 0.5F;
  std::vector<float> gates(2 * kWidth);
  std::vector<float> factors(2 * kWidth);
  std::vector<float> biases(kWidth);
  std::vector<float> factor_biases(kWidth);
  for (std::size_t i = 0; i < gates.size(); ++i) {
    gates[i] = static_cast<float>(i % 5) * 0.5F - 1.0F;  // -1 to 1, minus the bias
    factors[i] = i % 7 == 0 ? kInfinity : i % 11 == 0 ? std::nanf("") : static_cast<float>(i % 3) - 1.5F;
  }
  for (std::size_t i = 0; i < biases.size(); ++i) {
    biases[i] = 0.25F * static_cast<float>(i % 2);
    factor_biases[i] = static_cast<float>(i % 4) - 1.0F;
  }
  for (const bool has_biases : {false, true}) {
    for (const bool activates_both : {false, true}) {
      std::vector<std::byte> out(gates.size() * size_of(dtype), std::byte{0xab});
      const ActivatedTile tile{.x = gates.data(),
                               .linear = factors.data(),
                               .stride = kWidth,
                               .bias = has_biases ? biases.data() : nullptr,
                               .linear_bias = has_biases ? factor_biases.data() : nullptr,
                               .rows = 2,
                               .width = kWidth,
                               .out = out.data(),
                               .out_stride = kWidth * static_cast<std::int64_t>(size_of(dtype)),
                               .out_type = dtype,
                               .threshold = kThreshold};
      (activates_both ? table.relu_mul_relu : table.relu_mul)(tile);
      for (std::size_t i = 0; i < gates.size(); ++i) {
        const float found = load_as_float(out.data(), dtype, i);
        const float gate = gates[i] + (has_biases ? biases[i % kWidth] : 0.0F);
        float factor = factors[i] + (has_biases ? factor_biases[i % kWidth] : 0.0F);
        if (activates_both && factor < 0.0F) factor = 0.0F;
        if (gate <= kThreshold) {
          BOOST_TEST(found == 0.0F);
          BOOST_TEST(!std::signbit(found));
        } else if (std::isnan(factor)) {
          BOOST_TEST(std::isnan(found));
        } else {
          BOOST_TEST(found == gate * factor);
        }
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::sparse_gemm_test
