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

namespace adaptrt::codebook_gemm_test {
namespace {

namespace data = boost::unit_test::data;

struct Values {
  DType engine;
  DType value;
};
/// Value types that an engine of each type can have.
constexpr Values kValues[] = {{DType::kFloat32, DType::kFloat32},
                              {DType::kFloat32, DType::kFloat16},
                              {DType::kFloat32, DType::kBFloat16},
                              {DType::kFloat16, DType::kFloat16},
                              {DType::kBFloat16, DType::kBFloat16}};
/// Scales of every type; groups of one word, and of more than a part of k.
Quantization quantization_of(WeightCode code, DType value, std::int64_t group_size) {
  if (code == WeightCode::kLLMInt8) {
    return {.algo = QuantAlgo::kW8A16, .scale_type = DType::kFloat32, .code = code, .value_type = value};
  }
  const DType scales = group_size == 8    ? DType::kBFloat16
                       : group_size == 40 ? DType::kFloat16
                                          : DType::kFloat32;
  return {.algo = code == WeightCode::kE4M3 ? QuantAlgo::kW8A16 : QuantAlgo::kW4A16,
          .group_size = group_size,
          .scale_type = scales,
          .code = code,
          .value_type = value};
}
constexpr std::int64_t kGroupSizes[] = {8, 40, 64, 320};

/// Returns the matrix in the engine's type.
std::vector<std::byte> plain_panels(const QuantizedMatrix& matrix, DType engine) {
  const auto values = matrix.values();
  std::vector<std::byte> panels(panel_bytes(engine, matrix.n, matrix.k));
  pack_panels(panels.data(), engine, matrix.n, matrix.k, 0, matrix.n,
              reinterpret_cast<const std::byte*>(values.data()), DType::kFloat32, matrix.k);
  return panels;
}

/// True if rows have the same product with the matrix as with its values in the engine's type. `gemm` has no
/// panel and no output yet.
bool has_bits_of_plain(const KernelTable& table, DType engine, const QuantizedMatrix& matrix,
                       const std::vector<std::byte>& plain, PanelGemm gemm) {
  const auto type = static_cast<std::size_t>(engine);
  std::vector<float> expected(static_cast<std::size_t>(gemm.call.rows * gemm.call.out_stride), kPoison);
  auto out = expected;
  PanelGemm of_plain = gemm;
  of_plain.fetch = {};
  of_plain.call.panel = plain.data();
  of_plain.call.out = expected.data();
  table.gemm[type](of_plain);
  gemm.call.panel = matrix.panels.data();
  gemm.call.out = out.data();
  table.codebook_gemm[type](gemm, matrix.quantization);
  return std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0;
}

BOOST_AUTO_TEST_SUITE(codebook_gemm)

// Each product is computed here in float32 and rounded once.
BOOST_AUTO_TEST_CASE(weights_are_numbers_of_the_table_times_scales) {
  constexpr std::int64_t kInputs = 16;
  const float scales[] = {0.3F, 1e-3F};
  std::vector<std::byte> weights(kInputs / 2);
  for (int i = 0; i < kInputs / 2; ++i) weights[i] = static_cast<std::byte>(2 * i | (2 * i + 1) << 4);
  for (const WeightCode code : {WeightCode::kNF4, WeightCode::kFP4, WeightCode::kE2M1}) {
    for (const DType value : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const Quantization how{.algo = QuantAlgo::kW4A16,
                             .group_size = 8,
                             .scale_type = DType::kFloat32,
                             .code = code,
                             .value_type = value};
      std::vector<std::byte> panels(panel_bytes(how, DType::kFloat32, 1, kInputs));
      pack_quantized_panels(panels.data(), how, 1, kInputs, 0, 1, {weights.data(), scales, nullptr});
      float out[kInputs];
      unpack_panel_row({panels.data(), DType::kFloat32, 1, kInputs, nullptr, how}, 0, out);
      for (int i = 0; i < kInputs; ++i) {
        const float product = code_table(code)[i] * scales[i / 8];
        const float expected = value == DType::kFloat32   ? product
                               : value == DType::kFloat16 ? float16_to_float(float_to_float16(product))
                                                          : bfloat16_to_float(float_to_bfloat16(product));
        BOOST_TEST(out[i] == expected);
      }
    }
  }
}

// A sign, four exponent bits e and three fraction bits m: 2^(e - 7) (1 + m / 8), or 2^-6 m / 8 if e is 0.
BOOST_AUTO_TEST_CASE(weights_are_numbers_of_float8_times_scales) {
  constexpr std::int64_t kInputs = 256;
  const float scales[] = {0.3F, 1e-3F};
  std::vector<std::byte> weights(kInputs);
  for (int i = 0; i < kInputs; ++i) weights[i] = static_cast<std::byte>((i & 0x7f) == 0x7f ? 0 : i);
  for (const DType value : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const std::int64_t group_size : {0, 128}) {
      const Quantization how{.algo = QuantAlgo::kW8A16,
                             .group_size = group_size,
                             .scale_type = DType::kFloat32,
                             .code = WeightCode::kE4M3,
                             .value_type = value};
      std::vector<std::byte> panels(panel_bytes(how, DType::kFloat32, 1, kInputs));
      pack_quantized_panels(panels.data(), how, 1, kInputs, 0, 1, {weights.data(), scales, nullptr});
      float out[kInputs];
      unpack_panel_row({panels.data(), DType::kFloat32, 1, kInputs, nullptr, how}, 0, out);
      for (int i = 0; i < kInputs; ++i) {
        const int bits = (i & 0x7f) == 0x7f ? 0 : i;
        const int exponent = bits >> 3 & 15;
        const float fraction = static_cast<float>(bits & 7) / 8.0F;
        const float magnitude =
            exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, exponent - 7);
        const float product = (bits < 128 ? magnitude : -magnitude) * scales[group_size == 0 ? 0 : i / 128];
        const float expected = value == DType::kFloat32   ? product
                               : value == DType::kFloat16 ? float16_to_float(float_to_float16(product))
                                                          : bfloat16_to_float(float_to_bfloat16(product));
        BOOST_TEST(out[i] == expected);
      }
    }
  }
}

// bitsandbytes multiplies and rounds twice: no single scale gives all of these bits.
BOOST_AUTO_TEST_CASE(weights_of_llm_int8_are_multiplied_by_the_scale_and_then_by_the_factor) {
  constexpr std::int64_t kInputs = 256;
  const float scales[] = {0.3F, 1.7e-3F};
  std::vector<std::byte> weights(2 * kInputs);
  for (int i = 0; i < 2 * kInputs; ++i) weights[static_cast<std::size_t>(i)] = static_cast<std::byte>(i);
  int unlike_one_product = 0;
  for (const DType value : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Quantization how = quantization_of(WeightCode::kLLMInt8, value, 0);
    std::vector<std::byte> panels(panel_bytes(how, DType::kFloat32, 2, kInputs));
    pack_quantized_panels(panels.data(), how, 2, kInputs, 0, 2, {weights.data(), scales, nullptr});
    for (int row = 0; row < 2; ++row) {
      float out[kInputs];
      unpack_panel_row({panels.data(), DType::kFloat32, 2, kInputs, nullptr, how}, row, out);
      for (int i = 0; i < kInputs; ++i) {
        const auto integer = static_cast<float>(i < 128 ? i : i - 256);
        const volatile float product = integer * scales[row];
        const float twice = product * 7.874015718698502e-3F;
        const float expected = value == DType::kFloat32   ? twice
                               : value == DType::kFloat16 ? float16_to_float(float_to_float16(twice))
                                                          : bfloat16_to_float(float_to_bfloat16(twice));
        BOOST_TEST(out[i] == expected);
        if (twice != integer * (scales[row] * 7.874015718698502e-3F)) ++unlike_one_product;
      }
    }
  }
  BOOST_TEST(unlike_one_product > 0);
}

BOOST_DATA_TEST_CASE(products_and_panels_have_the_bits_of_the_values_stored,
                     kernel_tables() * data::make({0, 1, 2, 3, 4}) * data::make({1, 2, 3, 4, 5}), name, index,
                     code) {
  const auto& table = kernel_table(name);
  const auto [engine, value] = kValues[index];
  const auto type = static_cast<std::size_t>(engine);
  const DType activation = engine == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
  BOOST_TEST((table.codebook_gemm[type] == nullptr) == (table.codebook_rows[type] == 0));
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t group_size : kGroupSizes) {
      const Quantization how = quantization_of(static_cast<WeightCode>(code), value, group_size);
      for (const std::int64_t width : {1, 7, 16, 40, 61, 64}) {
        // The last group of FP8 may be shorter; LLM.int8() has no groups.
        const bool any_inputs = how.algo == QuantAlgo::kW8A16;
        const std::int64_t k = group_size * (group_size < 64 ? 9 : 2) - (any_inputs ? 6 : 0);
        const QuantizedMatrix matrix(how, width, k, &random);
        const auto plain = plain_panels(matrix, engine);
        std::vector<std::byte> made(plain.size() + 1, std::byte{0xab});
        table.expand_codebook[type](matrix.panels.data(), how, k, width, made.data());
        BOOST_TEST_REQUIRE(std::memcmp(made.data(), plain.data(), plain.size()) == 0,
                           "width " << width << " group_size " << group_size);
        BOOST_TEST((made.back() == std::byte{0xab}));
        if (width < kPanelColumns) continue;
        for (const std::int64_t rows : {1, 2, 3, 4, 6, 7, 13, 23, 24, 40}) {
          if (rows > table.codebook_rows[type]) break;
          const std::int64_t stride = k + 2;
          std::vector<std::byte> a(static_cast<std::size_t>(rows * stride) * size_of(activation));
          for (std::int64_t i = 0; i < rows * stride; ++i) {
            store_from_float(a.data(), activation, static_cast<std::size_t>(i), random.between(-1.0F, 1.0F));
          }
          const MemorySpan spans[] = {{a.data(), 1000}, {a.data(), 1}};
          PanelGemm gemm{.call = {.a = a.data(),
                                  .a_stride = stride,
                                  .k = k,
                                  .width = width,
                                  .out_stride = width + 1,
                                  .rows = rows}};
          if (rows % 3 == 0) gemm.fetch = spans;
          BOOST_TEST_REQUIRE(has_bits_of_plain(table, engine, matrix, plain, gemm),
                             "rows " << rows << " k " << k << " group_size " << group_size);
        }
      }
    }
  }
}

// For few rows, such scales are added to exponents if no product is infinite or subnormal, group by group.
BOOST_DATA_TEST_CASE(scales_may_be_powers_of_two, kernel_tables() * data::make({8, 32}), name, group_size) {
  constexpr auto kBFloat16 = static_cast<std::size_t>(DType::kBFloat16);
  constexpr std::int64_t kInputs = 320;
  const auto& table = kernel_table(name);
  if (table.codebook_gemm[kBFloat16] == nullptr) return;
  const Quantization how{.algo = QuantAlgo::kW4A16,
                         .group_size = group_size,
                         .scale_type = DType::kBFloat16,
                         .code = WeightCode::kE2M1,
                         .value_type = DType::kBFloat16};
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    // Scales that some outputs have in their second group.
    constexpr float kOdd[] = {0x1p-2F,  0x1p-125F, 0x1p-126F, 0x1p124F, 0x1p125F,
                              0x1p126F, 0x1.8p-3F, 0.0F,      -0x1p-3F};
    const std::int64_t groups = group_count(how, kInputs);
    for (const float odd : kOdd) {
      QuantizedMatrix matrix(how, kPanelColumns, kInputs, &random);
      for (std::size_t i = 0; i < matrix.scales.size(); ++i) {
        const auto power = static_cast<int>(random.between(-12.0F, -1.0F));
        const auto at = static_cast<std::int64_t>(i);
        const bool is_odd = at % groups == 1 && at / groups % 4 == 1;
        matrix.scales[i] = is_odd ? odd : std::ldexp(1.0F, power);
      }
      matrix.pack();
      const auto plain = plain_panels(matrix, DType::kBFloat16);
      for (const std::int64_t rows : {1, 2, 3, 4, 7}) {
        std::vector<std::byte> a(static_cast<std::size_t>(2 * rows * kInputs));
        for (std::int64_t i = 0; i < rows * kInputs; ++i) {
          store_from_float(a.data(), DType::kBFloat16, static_cast<std::size_t>(i),
                           random.between(0.25F, 1.0F));
        }
        const PanelGemm gemm{.call = {.a = a.data(),
                                      .a_stride = kInputs,
                                      .k = kInputs,
                                      .width = kPanelColumns,
                                      .out_stride = kPanelColumns,
                                      .rows = rows}};
        BOOST_TEST_REQUIRE(has_bits_of_plain(table, DType::kBFloat16, matrix, plain, gemm),
                           "rows " << rows << " scale " << odd);
      }
    }
  }
}

// Tile kernels split long inputs into parts.
BOOST_DATA_TEST_CASE(products_are_the_same_in_parts, kernel_tables() * data::make({1, 3, 4, 5}), name, code) {
  constexpr auto kBFloat16 = static_cast<std::size_t>(DType::kBFloat16);
  constexpr std::int64_t kInputs = 1600, kPart = 512;
  const auto& table = kernel_table(name);
  if (table.part_bytes == 0) return;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const Quantization how = quantization_of(static_cast<WeightCode>(code), DType::kBFloat16, 64);
    const QuantizedMatrix matrix(how, kPanelColumns, kInputs, &random);
    for (const std::int64_t rows : {1, 3, 5, 40}) {
      std::vector<std::byte> a(static_cast<std::size_t>(2 * rows * kInputs));
      for (std::int64_t i = 0; i < rows * kInputs; ++i) {
        store_from_float(a.data(), DType::kBFloat16, static_cast<std::size_t>(i),
                         random.between(-1.0F, 1.0F));
      }
      std::vector<float> whole(static_cast<std::size_t>(rows * kPanelColumns), kPoison);
      auto in_parts = whole;
      PanelGemm gemm{.call = {.a = a.data(),
                              .a_stride = kInputs,
                              .panel = matrix.panels.data(),
                              .k = kInputs,
                              .width = kPanelColumns,
                              .out = whole.data(),
                              .out_stride = kPanelColumns,
                              .rows = rows}};
      table.codebook_gemm[kBFloat16](gemm, how);
      gemm.call.out = in_parts.data();
      for (std::int64_t begin = 0; begin < kInputs; begin += kPart) {
        gemm.call.part = InputRange{begin, std::min(begin + kPart, kInputs)};
        table.codebook_gemm[kBFloat16](gemm, how);
      }
      BOOST_TEST_REQUIRE(std::memcmp(in_parts.data(), whole.data(), whole.size() * sizeof(float)) == 0,
                         "rows " << rows);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::codebook_gemm_test
