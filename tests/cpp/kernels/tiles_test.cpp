// Products on tile registers: emulated tiles give a CPU's bits, and bits do not depend on how a product is
// split.

#include <algorithm>
#include <array>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "adaptrt/core/panels.h"
#include "kernel_tables.h"
#include "quantized_matrix.h"

namespace adaptrt::tiles_test {
namespace {

namespace data = boost::unit_test::data;

constexpr auto kBFloat16 = static_cast<std::size_t>(DType::kBFloat16);
/// Step size of KernelTable::pack_rows.
constexpr std::int64_t kStepInputs = 32;
constexpr std::int64_t kStepBytes = 64;
constexpr std::int64_t kTileRows = 16;

/// The tables with products on tile registers.
auto tiled_tables() {
  std::vector<std::string> names;
  for (const auto* table : testing::all_kernel_tables()) {
    if (table->pack_rows != nullptr) names.emplace_back(table->name);
  }
  return data::make(std::move(names));
}

/// Returns the CPU's own table with tile registers, or nullptr.
const KernelTable* native_table() {
  for (const auto* table : available_kernels()) {
    if (table->pack_rows != nullptr) return table;
  }
  return nullptr;
}

/// Range of biased exponents of the operands.
struct Exponents {
  std::uint32_t least;
  std::uint32_t count;
};

std::vector<std::uint16_t> random_bfloat16(std::int64_t size, Exponents exponents, std::mt19937* random) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(size));
  for (auto& value : values) {
    const auto bits = static_cast<std::uint32_t>((*random)());
    value = static_cast<std::uint16_t>((bits & 0x807fU) | (exponents.least + (bits >> 16U) % exponents.count)
                                                              << 7U);
  }
  return values;
}

/// bfloat16 rows and a full panel.
struct Operands {
  Operands(std::int64_t num_rows, std::int64_t depth, Exponents exponents, std::mt19937* random)
      : rows(num_rows),
        k(depth),
        a(random_bfloat16(rows * k, exponents, random)),
        panel(random_bfloat16(padded_k(DType::kBFloat16, k) * kPanelColumns, exponents, random)) {
    // Padding of an odd k.
    for (std::int64_t n = 0; k % 2 != 0 && n < kPanelColumns; ++n) {
      panel[static_cast<std::size_t>((k / 2 * kPanelColumns + n) * 2 + 1)] = 0;
    }
  }

  [[nodiscard]] PanelGemm gemm(float* out) const {
    return {.call = {.a = a.data(),
                     .a_stride = k,
                     .panel = reinterpret_cast<const std::byte*>(panel.data()),
                     .k = k,
                     .width = kPanelColumns,
                     .out = out,
                     .out_stride = kPanelColumns,
                     .rows = rows}};
  }

  [[nodiscard]] std::vector<float> product(const KernelTable& table) const {
    std::vector<float> out(static_cast<std::size_t>(rows * kPanelColumns), kPoison);
    table.gemm[kBFloat16](gemm(out.data()));
    return out;
  }

  std::int64_t rows;
  std::int64_t k;
  std::vector<std::uint16_t> a;
  std::vector<std::uint16_t> panel;
};

/// The result of pack_rows for some rows, after `before` other ones.
struct PackedRows {
  PackedRows(const KernelTable& table, const Operands& operands, std::int64_t before)
      : step_bytes((before + operands.rows + 2 * kTileRows) / kTileRows * kTileRows * kStepBytes) {
    // Everything around them is NaN.
    const std::int64_t steps = (operands.k + kStepInputs - 1) / kStepInputs;
    bytes.assign(static_cast<std::size_t>(steps * step_bytes), std::byte{0xff});
    data = bytes.data() + before * kStepBytes;
    table.pack_rows({reinterpret_cast<const std::byte*>(operands.a.data()), operands.k * 2, operands.k * 2},
                    operands.rows, data, step_bytes);
  }

  std::int64_t step_bytes;
  std::vector<std::byte> bytes;
  std::byte* data;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Place for the sums of `rows` rows, and for a row after them that no product may write.
std::vector<float> rows_and_one_more(std::int64_t rows) {
  return std::vector<float>(static_cast<std::size_t>((rows + 1) * kPanelColumns), kPoison);
}

BOOST_AUTO_TEST_SUITE(tiles)

// The numbers are ordinary, have subnormal products, or are subnormal. Few rows are multiplied without tiles,
// more rows with tiles.
BOOST_DATA_TEST_CASE(emulated_tiles_give_the_bits_of_a_cpu, data::make({1, 3, 4, 16, 23, 37, 144, 155, 200}),
                     rows) {
  const KernelTable* native = native_table();
  if (native == nullptr) {
    BOOST_TEST_MESSAGE("not compared: this CPU has no tile registers, or Linux does not permit them");
    return;
  }
  constexpr Exponents kKinds[] = {{120, 8}, {90, 70}, {50, 30}, {60, 8}, {0, 80}, {0, 255}};
  // For fewer rows the emulation rounds subnormal products, but a fused operation does not.
  const bool has_tiles = rows > 3;
  FreshRandom seeds;
  std::mt19937 random(seeds.seed());
  BOOST_TEST_CONTEXT("seed " << seeds.seed()) {
    for (const Exponents& exponents : kKinds) {
      if (!has_tiles && exponents.least < 90) continue;
      for (const std::int64_t k : {1, 31, 32, 70, 513}) {
        const Operands operands(rows, k, exponents, &random);
        const auto expected = operands.product(*native);
        const auto emulated = operands.product(testing::emulated_amx_kernels());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          if (std::isnan(expected[i]) && std::isnan(emulated[i])) continue;
          BOOST_TEST_REQUIRE(std::memcmp(&expected[i], &emulated[i], sizeof(float)) == 0,
                             "exponents from " << exponents.least << " k " << k << " element " << i << ": "
                                               << expected[i] << " and " << emulated[i]);
        }
      }
    }
  }
}

// Few rows are multiplied without tiles, but with the rounding and subnormal handling of tiles.
BOOST_AUTO_TEST_CASE(subnormal_products_have_one_result_alone_and_in_a_crowd) {
  const KernelTable* native = native_table();
  if (native == nullptr) return;
  FreshRandom seeds;
  std::mt19937 random(seeds.seed());
  BOOST_TEST_CONTEXT("seed " << seeds.seed()) {
    for (const Exponents exponents : {Exponents{50, 30}, Exponents{60, 8}, Exponents{0, 80}}) {
      const Operands operands(20, 133, exponents, &random);
      const auto crowd = operands.product(*native);
      for (std::int64_t row = 0; row < operands.rows; ++row) {
        std::vector<float> alone(kPanelColumns);
        auto gemm = operands.gemm(alone.data());
        gemm.call.a = operands.a.data() + row * operands.k;
        gemm.call.rows = 1;
        native->gemm[kBFloat16](gemm);
        BOOST_TEST_REQUIRE(std::memcmp(alone.data(), crowd.data() + row * kPanelColumns,
                                       kPanelColumns * sizeof(float)) == 0);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(packed_rows_and_parts_leave_the_bits_as_they_are,
                     tiled_tables() * data::make({1, 5, 16, 23, 33, 64, 144, 155, 200}), name, rows) {
  const auto& table = kernel_table(name);
  FreshRandom seeds;
  std::mt19937 random(seeds.seed());
  BOOST_TEST_CONTEXT("seed " << seeds.seed()) {
    for (const std::int64_t k : {20, 512, 1061}) {
      const Operands operands(rows, k, {120, 8}, &random);
      const auto expected = operands.product(table);
      const PackedRows packed(table, operands, 7);
      for (const bool in_parts : {false, true}) {
        for (const bool is_packed : {false, true}) {
          std::vector<float> out(expected.size(), kPoison);
          auto gemm = operands.gemm(out.data());
          if (is_packed) {
            gemm.call.a = nullptr;
            gemm.a_steps = packed.data;
            gemm.a_step_bytes = packed.step_bytes;
          }
          const std::int64_t part = in_parts ? 512 : k;
          for (std::int64_t begin = 0; begin < k; begin += part) {
            gemm.call.part = InputRange{begin, std::min(begin + part, k)};
            table.gemm[kBFloat16](gemm);
          }
          BOOST_TEST_REQUIRE(same_bits(out, expected),
                             "k " << k << " parts " << in_parts << " packed " << is_packed);
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(rows_are_packed_in_the_order_that_they_are_asked_for,
                     tiled_tables() * data::make({1, 16, 23, 48}), name, rows) {
  const auto& table = kernel_table(name);
  FreshRandom seeds;
  std::mt19937 random(seeds.seed());
  BOOST_TEST_CONTEXT("seed " << seeds.seed()) {
    for (const std::int64_t k : {20, 32, 133}) {
      const Operands source(9, k, {120, 8}, &random);
      std::vector<std::int32_t> row_of(static_cast<std::size_t>(rows));
      Operands gathered(rows, k, {120, 8}, &random);
      for (std::int64_t row = 0; row < rows; ++row) {
        const auto from = static_cast<std::int32_t>(random() % 9);
        row_of[static_cast<std::size_t>(row)] = from;
        std::copy_n(source.a.begin() + from * k, k, gathered.a.begin() + row * k);
      }
      const PackedRows expected(table, gathered, 2);
      PackedRows made(table, gathered, 2);
      std::ranges::fill(made.bytes, std::byte{0xff});
      table.pack_rows({reinterpret_cast<const std::byte*>(source.a.data()), k * 2, k * 2, row_of.data()},
                      rows, made.data, made.step_bytes);
      BOOST_TEST(made.bytes == expected.bytes);
    }
  }
}

constexpr Quantization kQuantizations[] = {
    {.algo = QuantAlgo::kW8A16},
    {.algo = QuantAlgo::kW8A16, .group_size = 32, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .group_size = 128, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW8A16, .zero_points = true},
    {.algo = QuantAlgo::kW8A16, .group_size = 64, .zero_points = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A16},
    {.algo = QuantAlgo::kW4A16, .group_size = 8},
    {.algo = QuantAlgo::kW4A16, .group_size = 128},
    {.algo = QuantAlgo::kW4A16, .group_size = 64, .zero_points = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 1024},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .zero_points = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .group_size = 16, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW8A16, .group_size = 32, .minimums = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .minimums = true, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .minimums = true, .scale_type = DType::kFloat32, .bits = 2},
    {.algo = QuantAlgo::kW4A16, .group_size = 64, .bits = 2},
    {.algo = QuantAlgo::kW4A16, .group_size = 128, .zero_points = true, .bits = 3}};

// For many rows, columns of weights are copied a few steps at a time. For at most one tile of packed rows,
// whole panels are decoded one step ahead.
BOOST_DATA_TEST_CASE(quantised_rows_have_the_bits_alone_that_they_have_among_many,
                     tiled_tables() * data::xrange(std::size(kQuantizations)), name, index) {
  constexpr std::int64_t kRows = 232;
  const auto& table = kernel_table(name);
  const Quantization& quantization = kQuantizations[index];
  const std::int64_t kInputs = quantization.bits < 4 ? 1088 : 1090;
  FreshRandom random;
  std::mt19937 bits(random.seed());
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const QuantizedMatrix weights(quantization, kPanelColumns, kInputs, &random);
    const Operands operands(kRows, kInputs, {120, 8}, &bits);
    const std::int64_t groups = group_count(quantization, kInputs);
    const std::vector<float> sums = random.vector(kRows * groups);
    const PackedRows packed(table, operands, 0);
    std::vector<float> crowd(static_cast<std::size_t>(kRows * kPanelColumns), kPoison);
    QuantizedGemm gemm{.call = {.a = operands.a.data(),
                                .a_stride = kInputs,
                                .panel = weights.panels.data(),
                                .k = kInputs,
                                .width = kPanelColumns,
                                .out = crowd.data(),
                                .out_stride = kPanelColumns,
                                .rows = kRows},
                       .activation = DType::kBFloat16,
                       .a_steps = packed.data,
                       .a_step_bytes = packed.step_bytes,
                       .a_sums = sums.data(),
                       .quantization = quantization};
    multiply(table, gemm);
    const std::int64_t part = std::lcm(std::int64_t{512}, std::max<std::int64_t>(1, quantization.group_size));
    struct Alone {
      std::int64_t row;
      std::int64_t count;
      bool is_packed;
      bool in_parts;
    };
    for (const auto& [row, count, is_packed, in_parts] :
         {Alone{0, 1, false, false}, Alone{31, 1, false, true}, Alone{199, 1, true, false},
          Alone{231, 1, true, true}, Alone{3, 2, true, false}, Alone{77, 3, false, false},
          Alone{16, 3, true, true}, Alone{100, 7, true, false}, Alone{41, 15, true, false},
          Alone{122, 15, true, true}, Alone{64, 16, true, true}, Alone{200, 16, true, false},
          Alone{9, 16, false, false}}) {
      auto alone = rows_and_one_more(count);
      std::vector<float> expected(crowd.begin() + row * kPanelColumns,
                                  crowd.begin() + (row + count) * kPanelColumns);
      expected.resize(alone.size(), kPoison);
      gemm.call.a = operands.a.data() + row * kInputs;
      gemm.a_steps = is_packed ? packed.data + row * kStepBytes : nullptr;
      gemm.a_sums = sums.data() + row * groups;
      gemm.call.out = alone.data();
      gemm.call.rows = count;
      for (std::int64_t begin = 0; begin < kInputs; begin += in_parts ? part : kInputs) {
        gemm.call.part = InputRange{begin, std::min(begin + (in_parts ? part : kInputs), kInputs)};
        multiply(table, gemm);
      }
      BOOST_TEST_REQUIRE(same_bits(alone, expected), "row " << row << " and " << count << " packed "
                                                            << is_packed << " parts " << in_parts);
    }
  }
}

constexpr Quantization kCodes[] = {
    {.algo = QuantAlgo::kW4A16, .group_size = 64, .code = WeightCode::kNF4, .value_type = DType::kBFloat16},
    {.algo = QuantAlgo::kW4A16, .group_size = 40, .code = WeightCode::kE2M1, .value_type = DType::kBFloat16},
    {.algo = QuantAlgo::kW8A16, .group_size = 128, .code = WeightCode::kE4M3, .value_type = DType::kBFloat16},
    {.algo = QuantAlgo::kW8A16,
     .scale_type = DType::kFloat32,
     .code = WeightCode::kLLMInt8,
     .value_type = DType::kBFloat16}};

// At most one tile of packed rows is multiplied while the panel is decoded.
BOOST_DATA_TEST_CASE(codebook_rows_have_the_bits_of_the_panel_that_is_made,
                     tiled_tables() * data::xrange(std::size(kCodes)) * data::make({1, 3, 7, 15, 16, 20}),
                     name, index, rows) {
  constexpr std::int64_t kInputs = 1080;
  const auto& table = kernel_table(name);
  FreshRandom random;
  std::mt19937 bits(random.seed());
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const QuantizedMatrix weights(kCodes[index], kPanelColumns, kInputs, &random);
    const Operands operands(rows, kInputs, {120, 8}, &bits);
    const PackedRows packed(table, operands, 5);
    std::vector<std::byte> made(panel_bytes(DType::kBFloat16, kPanelColumns, kInputs));
    table.expand_codebook[kBFloat16](weights.panels.data(), kCodes[index], kInputs, kPanelColumns,
                                     made.data());
    auto expected = rows_and_one_more(rows);
    auto gemm = operands.gemm(expected.data());
    gemm.call.panel = made.data();
    table.gemm[kBFloat16](gemm);
    gemm.call.panel = weights.panels.data();
    for (const bool is_packed : {false, true}) {
      for (const bool in_parts : {false, true}) {
        std::vector<float> out(expected.size(), kPoison);
        gemm.call.out = out.data();
        gemm.a_steps = is_packed ? packed.data : nullptr;
        gemm.a_step_bytes = packed.step_bytes;
        const std::int64_t part = in_parts ? 640 : kInputs;
        for (std::int64_t begin = 0; begin < kInputs; begin += part) {
          gemm.call.part = InputRange{begin, std::min(begin + part, kInputs)};
          table.codebook_gemm[kBFloat16](gemm, kCodes[index]);
        }
        BOOST_TEST_REQUIRE(same_bits(out, expected), "packed " << is_packed << " parts " << in_parts);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(quantised_products_are_the_same_in_parts,
                     tiled_tables() * data::xrange(std::size(kQuantizations)), name, index) {
  const auto& table = kernel_table(name);
  const Quantization& quantization = kQuantizations[index];
  FreshRandom random;
  std::mt19937 bits(random.seed());
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t rows : {1, 7, 40}) {
      const std::int64_t kInputs = quantization.bits < 4 ? 2048 : 2050;
      const QuantizedMatrix weights(quantization, 61, kInputs, &random);
      const Operands operands(rows, kInputs, {120, 8}, &bits);
      const PackedRows packed(table, operands, 3);
      const std::vector<float> sums = random.vector(rows * group_count(quantization, kInputs));
      std::vector<float> whole(static_cast<std::size_t>(rows * kPanelColumns), kPoison);
      auto in_parts = whole;
      QuantizedGemm gemm{.call = {.a = operands.a.data(),
                                  .a_stride = kInputs,
                                  .panel = weights.panels.data(),
                                  .k = kInputs,
                                  .width = 61,
                                  .out = whole.data(),
                                  .out_stride = kPanelColumns,
                                  .rows = rows},
                         .activation = DType::kBFloat16,
                         .a_sums = sums.data(),
                         .quantization = quantization};
      multiply(table, gemm);
      gemm.call.out = in_parts.data();
      gemm.a_steps = packed.data;
      gemm.a_step_bytes = packed.step_bytes;
      for (std::int64_t begin = 0; begin < kInputs; begin += 1024) {
        gemm.call.part = InputRange{begin, std::min(begin + 1024, kInputs)};
        multiply(table, gemm);
      }
      BOOST_TEST_REQUIRE(same_bits(in_parts, whole), "rows " << rows);
    }
  }
}

#ifdef __x86_64__
// A library that uses tiles on the caller's thread leaves its own tile configuration, or none.
BOOST_AUTO_TEST_CASE(values_left_in_tiles_have_no_effect) {
  const KernelTable* native = native_table();
  if (native == nullptr) return;
  struct alignas(64) Configuration {
    std::uint8_t palette = 1;
    std::uint8_t unused[15] = {};
    std::uint16_t line_bytes[16] = {4, 8, 16, 32, 4, 8, 16, 32};
    std::uint8_t lines[16] = {1, 2, 3, 4, 5, 6, 7, 8};
  };
  static const Configuration others;
  std::mt19937 random(1);
  const Operands operands(37, 100, {120, 8}, &random);
  const auto expected = operands.product(testing::emulated_amx_kernels());
  asm volatile("ldtilecfg %0" ::"m"(others));
  BOOST_TEST(same_bits(operands.product(*native), expected));
  native->release_tiles();
  BOOST_TEST(same_bits(operands.product(*native), expected));
}
#endif

// Linux saves the tiles of a waiting thread: checks sums that are known in advance, with more threads than
// CPUs.
BOOST_AUTO_TEST_CASE(threads_that_outnumber_cpus_keep_their_tiles) {
  const KernelTable* native = native_table();
  if (native == nullptr) return;
  constexpr std::int64_t kInputs = 4096;
  constexpr int kProducts = 3000;
  const unsigned num_threads = 3 * std::max(2U, std::thread::hardware_concurrency());
  std::vector<int> wrong(num_threads, 0);
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 unused(thread);
      Operands operands(32, kInputs, {127, 1}, &unused);
      // Each row has the thread's value times one: sums are integers that float32 represents exactly.
      const auto value = static_cast<float>(thread + 1);
      for (auto& element : operands.a) element = float_to_bfloat16(value);
      for (auto& element : operands.panel) element = float_to_bfloat16(1.0F);
      for (int product = 0; product < kProducts; ++product) {
        for (const float sum : operands.product(*native)) {
          if (sum != value * kInputs) ++wrong[thread];
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const int count : wrong) BOOST_TEST(count == 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::tiles_test
