#include "adaptrt/core/compressed_panels.h"

#include <bit>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <random>
#include <vector>

#include "adaptrt/core/panels.h"

namespace adaptrt::compressed_panels_test {
namespace {

constexpr std::int64_t kInputs[] = {8, 64, 136};
/// Two compressed panels and a narrow one.
constexpr std::int64_t kOutputs = 2 * kPanelColumns + 20;

/// Rows of bfloat16 bits: all of W[kOutputs, k].
using Bits = std::vector<std::uint16_t>;

/// Elements with sixteen upper bytes; `others` per mille have arbitrary bits.
Bits random_bits(std::int64_t k, int others, std::mt19937* random) {
  Bits bits(static_cast<std::size_t>(kOutputs * k));
  for (auto& element : bits) {
    const auto any = static_cast<std::uint32_t>((*random)());
    const bool is_other = static_cast<int>((any >> 16U) % 1000) < others;
    const std::uint32_t exponent = 110 + (any >> 8U) % 16;  // eight upper bytes, and two signs
    element = static_cast<std::uint16_t>(is_other ? any : (any & 0x807fU) | exponent << 7U);
  }
  return bits;
}

std::vector<std::byte> panels_of(const Bits& bits, std::int64_t k) {
  std::vector<std::byte> panels(panel_bytes(DType::kBFloat16, kOutputs, k));
  pack_panels(panels.data(), DType::kBFloat16, kOutputs, k, 0, kOutputs,
              reinterpret_cast<const std::byte*>(bits.data()), DType::kBFloat16, k);
  return panels;
}

/// Returns the largest number of outliers of a panel.
std::int64_t max_outliers(const std::vector<std::byte>& panels, std::int64_t k) {
  std::int64_t most = 0;
  for (std::int64_t panel = 0; panel < kOutputs / kPanelColumns; ++panel) {
    most = std::max(most, count_outliers(panels.data() + panel_offset(DType::kBFloat16, k, panel), k));
  }
  return most;
}

std::vector<std::byte> compress(const std::vector<std::byte>& panels, std::int64_t k, std::int64_t outliers) {
  constexpr std::int64_t kWhole = kOutputs / kPanelColumns;
  const std::size_t bytes = compressed_panel_bytes(k, outliers);
  std::vector<std::byte> compressed(kWhole * bytes, std::byte{0xff});
  for (std::int64_t panel = 0; panel < kWhole; ++panel) {
    compress_panel(panels.data() + panel_offset(DType::kBFloat16, k, panel), k, outliers,
                   compressed.data() + static_cast<std::size_t>(panel) * bytes);
  }
  compressed.insert(compressed.end(), panels.begin() + kWhole * k * kPanelColumns * 2, panels.end());
  return compressed;
}

PanelMatrix matrix_of(const std::vector<std::byte>& compressed, std::int64_t k, std::int64_t outliers) {
  return {.data = compressed.data(), .dtype = DType::kBFloat16, .n = kOutputs, .k = k, .outliers = outliers};
}

BOOST_AUTO_TEST_SUITE(compressed_panels)

BOOST_DATA_TEST_CASE(rows_come_back_bit_by_bit,
                     boost::unit_test::data::make(kInputs) * boost::unit_test::data::make({0, 1, 30, 1000}),
                     k, others) {
  const std::uint32_t seed = std::random_device{}();
  BOOST_TEST_CONTEXT("seed " << seed) {
    std::mt19937 random(seed);
    const Bits bits = random_bits(k, others, &random);
    const auto panels = panels_of(bits, k);
    const std::int64_t most = max_outliers(panels, k);
    BOOST_TEST((most > 0) == (others > 0 && most > 0));
    if (others == 0) BOOST_TEST(most == 0);
    if (others == 1000) BOOST_TEST(most > k * kPanelColumns / 2);
    for (const std::int64_t places : {most, most + 3}) {
      const auto compressed = compress(panels, k, places);
      const PanelMatrix matrix = matrix_of(compressed, k, places);
      BOOST_TEST_REQUIRE(matrix.bytes() == compressed.size());
      std::vector<float> row(static_cast<std::size_t>(k));
      for (std::int64_t r = 0; r < kOutputs; ++r) {
        unpack_panel_row(matrix, r, row.data());
        for (std::int64_t i = 0; i < k; ++i) {
          const auto expected = bits[static_cast<std::size_t>(r * k + i)];
          BOOST_TEST_REQUIRE(std::bit_cast<std::uint32_t>(row[static_cast<std::size_t>(i)]) ==
                             std::uint32_t{expected} << 16U);
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(the_most_frequent_upper_bytes_are_in_the_table) {
  constexpr std::int64_t kDepth = 8;
  Bits bits(static_cast<std::size_t>(kOutputs * kDepth), 0x3f80);
  // The first panel has seventeen more upper bytes; the two rarest occur twice and once.
  for (std::uint16_t upper = 0; upper < 15; ++upper) {
    for (std::size_t i = 0; i < 4; ++i) bits[4 * upper + i] = static_cast<std::uint16_t>(upper << 8U);
  }
  bits[60] = bits[61] = 0xc800;
  bits[62] = 0xc900;
  const auto panels = panels_of(bits, kDepth);
  BOOST_TEST(count_outliers(panels.data(), kDepth) == 3);
  BOOST_TEST(count_outliers(panels.data() + panel_offset(DType::kBFloat16, kDepth, 1), kDepth) == 0);
}

BOOST_AUTO_TEST_CASE(inputs_of_whole_pieces_can_be_compressed) {
  BOOST_TEST(can_be_compressed(64, 8));
  BOOST_TEST(can_be_compressed(32000, 4096));
  for (const std::int64_t n : {1, 63, 65}) BOOST_TEST(can_be_compressed(n, 8));
  BOOST_TEST(!can_be_compressed(0, 8));
  for (const std::int64_t k : {0, 2, 7, 12}) BOOST_TEST(!can_be_compressed(64, k));
  BOOST_TEST(!can_be_compressed(64, std::int64_t{1} << 32));
  const std::size_t whole = compressed_panel_bytes(8, 3);
  BOOST_TEST(compressed_bytes(128, 8, 3) == 2 * whole);
  BOOST_TEST(compressed_bytes(129, 8, 3) == 2 * whole + 8 * 2);
}

BOOST_AUTO_TEST_CASE(a_count_of_a_damaged_panel_is_no_more_than_its_places) {
  constexpr std::int64_t kDepth = 8;
  constexpr std::int64_t kPlaces = 2;
  std::mt19937 random(1);
  auto compressed = compress(panels_of(random_bits(kDepth, 0, &random), kDepth), kDepth, kPlaces);
  std::memset(compressed.data() + kTableBytes, 0xff, 4);
  BOOST_TEST(parts_of_compressed(compressed.data(), kPlaces).count == kPlaces);
  // Positions outside the panel are ignored.
  std::memset(compressed.data() + 64, 0xff, 4 * kPlaces);
  std::vector<float> row(kDepth);
  for (std::int64_t r = 0; r < kPanelColumns; ++r) {
    unpack_panel_row(matrix_of(compressed, kDepth, kPlaces), r, row.data());
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::compressed_panels_test
