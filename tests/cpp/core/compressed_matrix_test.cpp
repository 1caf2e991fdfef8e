#include "adaptrt/core/compressed_matrix.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <random>
#include <vector>

#include "adaptrt/core/panels.h"

namespace adaptrt::compressed_matrix_test {
namespace {

constexpr std::int64_t kOutputs[] = {1, 8, 20, 64, 100, 192};
constexpr std::int64_t kInputs[] = {1, 2, 7, 16, 136};

/// Panels of elements with sixteen upper bytes; `others` per mille have arbitrary bits.
std::vector<std::byte> random_panels(std::int64_t n, std::int64_t k, int others, std::mt19937* random) {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(n * k));
  for (auto& element : bits) {
    const auto any = static_cast<std::uint32_t>((*random)());
    const bool is_other = static_cast<int>((any >> 16U) % 1000) < others;
    const std::uint32_t exponent = 110 + (any >> 8U) % 16;
    element = static_cast<std::uint16_t>(is_other ? any : (any & 0x807fU) | exponent << 7U);
  }
  std::vector<std::byte> panels(panel_bytes(DType::kBFloat16, n, k));
  pack_panels(panels.data(), DType::kBFloat16, n, k, 0, n, reinterpret_cast<const std::byte*>(bits.data()),
              DType::kBFloat16, k);
  return panels;
}

BOOST_AUTO_TEST_SUITE(compressed_matrix)

BOOST_DATA_TEST_CASE(expanding_gives_the_panels, boost::unit_test::data::make({0, 5, 30, 1000}), others) {
  constexpr std::byte kUntouched{0xab};
  const std::uint32_t seed = std::random_device{}();
  BOOST_TEST_CONTEXT("seed " << seed) {
    std::mt19937 random(seed);
    for (const std::int64_t n : kOutputs) {
      for (const std::int64_t k : kInputs) {
        const std::vector<std::byte> panels = random_panels(n, k, others, &random);
        std::vector<std::byte> out(panels.size() + 1, kUntouched);
        const std::size_t bytes = compress_matrix(panels.data(), n, k, out.data());
        BOOST_TEST_REQUIRE((out.back() == kUntouched));
        if (others == 1000) BOOST_TEST(bytes == 0U);
        if (others == 0 && n >= 64 && k >= 16) BOOST_TEST(bytes > 0U);
        if (bytes == 0) continue;
        BOOST_TEST(bytes < panels.size());
        BOOST_TEST(compressed_matrix_bytes(out.data(), n, k) == bytes);
        BOOST_TEST((expand_matrix(out.data(), n, k) == panels));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(twelve_bits_an_element_and_a_header) {
  std::mt19937 random(1);
  const std::vector<std::byte> panels = random_panels(128, 64, 0, &random);
  std::vector<std::byte> out(panels.size());
  BOOST_TEST(compress_matrix(panels.data(), 128, 64, out.data()) == 64U + panels.size() / 4 * 3);
}

BOOST_AUTO_TEST_CASE(panels_have_their_own_outliers) {
  constexpr std::int64_t kOutlierOutputs[] = {3, 70, 71, 130};
  std::mt19937 random(1);
  std::vector<std::byte> panels(panel_bytes(DType::kBFloat16, 192, 16));
  std::vector<std::uint16_t> bits(192 * 16, 0x3f80);
  // Seventeen upper bytes: the rarest ones are outliers.
  for (std::size_t i = 0; i < 16; ++i) bits[2 * i] = bits[2 * i + 1] = static_cast<std::uint16_t>(i << 8U);
  for (const std::int64_t output : kOutlierOutputs) bits[static_cast<std::size_t>(output * 16)] = 0x7000;
  bits[3 * 16] = 0x7100;
  pack_panels(panels.data(), DType::kBFloat16, 192, 16, 0, 192,
              reinterpret_cast<const std::byte*>(bits.data()), DType::kBFloat16, 16);
  std::vector<std::byte> out(panels.size());
  BOOST_TEST_REQUIRE(compress_matrix(panels.data(), 192, 16, out.data()) > 0U);
  BOOST_TEST((expand_matrix(out.data(), 192, 16) == panels));
  std::int64_t outliers = 0;
  for (std::int64_t panel = 0; panel < 3; ++panel) {
    const MatrixPanel found = find_matrix_panel(out.data(), 192, 16, panel);
    BOOST_TEST(found.num_pieces == 8);
    BOOST_TEST(found.first_place == panel * 8 * kPieceElements);
    BOOST_TEST((found.pieces == out.data() + matrix_panel_offset(16, panel)));
    outliers += found.count;
  }
  std::uint32_t stored = 0;
  std::memcpy(&stored, out.data() + kTableBytes, sizeof(stored));
  BOOST_TEST(outliers == stored);
  BOOST_TEST(outliers > 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::compressed_matrix_test
