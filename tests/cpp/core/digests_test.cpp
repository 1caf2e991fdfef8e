#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/checksum.h"
#include "adaptrt/core/sha256.h"

namespace adaptrt::digests_test {
namespace {

std::string hexadecimal(const Sha256Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[std::to_integer<int>(byte) >> shift & 15];
  }
  return text;
}

std::string sha256_of(const std::string& text) {
  return hexadecimal(Sha256().add(text).finish());
}

std::vector<std::byte> random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

BOOST_AUTO_TEST_SUITE(digests)

// The examples of FIPS 180-4's test vectors (NIST CAVP).
BOOST_AUTO_TEST_CASE(sha256_gives_the_standards_examples) {
  BOOST_TEST(sha256_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  BOOST_TEST(sha256_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  BOOST_TEST(sha256_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  BOOST_TEST(sha256_of(std::string(1'000'000, 'a')) ==
             "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

BOOST_AUTO_TEST_CASE(sha256_is_that_of_the_whole_however_it_is_cut) {
  const auto bytes = random_bytes(300, 1);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    const std::span whole = std::span(bytes).first(size);
    const Sha256Digest expected = Sha256().add(whole).finish();
    for (const std::size_t cut : {size / 3, size / 2, size - size / 5}) {
      BOOST_TEST((Sha256().add(whole.first(cut)).add(whole.subspan(cut)).finish() == expected));
    }
  }
}

BOOST_AUTO_TEST_CASE(sha256_takes_integers_with_the_lowest_byte_first) {
  BOOST_TEST(hexadecimal(Sha256().add_integer(0x6867666564636261ULL).finish()) == sha256_of("abcdefgh"));
}

BOOST_AUTO_TEST_CASE(every_changed_bit_changes_the_checksum) {
  for (const std::size_t size : {1U, 8U, 63U, 64U, 65U, 200U}) {
    auto bytes = random_bytes(size, 2);
    std::set<std::uint64_t> sums{checksum_of(bytes)};
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
      BOOST_TEST(sums.insert(checksum_of(bytes)).second);
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    }
  }
}

BOOST_AUTO_TEST_CASE(zeros_of_every_length_have_checksums_of_their_own) {
  const std::vector<std::byte> zeros(500);
  std::set<std::uint64_t> sums;
  for (std::size_t size = 0; size <= zeros.size(); ++size) {
    BOOST_TEST(sums.insert(checksum_of(std::span(zeros).first(size))).second);
  }
}

BOOST_AUTO_TEST_CASE(exchanged_parts_change_the_checksum) {
  auto bytes = random_bytes(256, 3);
  const std::uint64_t before = checksum_of(bytes);
  for (const std::size_t distance : {8U, 64U, 128U}) {
    auto moved = bytes;
    std::swap_ranges(moved.begin(), moved.begin() + 8, moved.begin() + static_cast<std::ptrdiff_t>(distance));
    BOOST_TEST(checksum_of(moved) != before);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::digests_test
