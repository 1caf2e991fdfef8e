#include "adaptrt/core/huge_array.h"

#include <unistd.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <fstream>
#include <limits>
#include <new>
#include <utility>

namespace adaptrt::huge_array_test {
namespace {

/// Bytes of this process's address space that are mapped. Under an emulator, /proc/self/statm would count the
/// emulator's own memory too; it shows only the program's in /proc/self/maps.
std::size_t mapped_bytes() {
  std::size_t bytes = 0;
  std::ifstream maps("/proc/self/maps");
  std::size_t begin = 0;
  std::size_t end = 0;
  char dash = 0;
  maps >> std::hex;
  while (maps >> begin >> dash >> end) {
    bytes += end - begin;
    maps.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return bytes;
}

BOOST_AUTO_TEST_SUITE(huge_array)

BOOST_AUTO_TEST_CASE(memory_is_zeroed_writable_and_moves) {
  HugeArray array(100001);
  BOOST_TEST(array.bytes() == 100001U);
  BOOST_TEST(
      std::all_of(array.data(), array.data() + array.bytes(), [](std::byte b) { return b == std::byte{0}; }));
  array.data()[100000] = std::byte{7};
  const std::byte* data = array.data();
  HugeArray other = std::move(array);
  BOOST_TEST(other.data() == data);
  BOOST_TEST((other.data()[100000] == std::byte{7}));
  other = HugeArray();
  BOOST_TEST(other.bytes() == 0U);
  BOOST_TEST((other.data() == nullptr));
}

BOOST_AUTO_TEST_CASE(arrays_begin_at_a_huge_page_and_nothing_else_stays_mapped) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  mapped_bytes();  // the first call allocates buffers
  for (const std::size_t bytes : {kHugePage, kHugePage + 1, 3 * kHugePage - page, 5 * kHugePage + page - 1}) {
    // Assertions may allocate memory, so they come after the last count.
    const std::size_t before = mapped_bytes();
    std::size_t during = 0;
    const std::byte* begin = nullptr;
    {
      const HugeArray array(bytes);
      during = mapped_bytes();
      begin = array.data();
      array.data()[array.bytes() - 1] = std::byte{7};
    }
    const std::size_t after = mapped_bytes();
    BOOST_TEST(reinterpret_cast<std::uintptr_t>(begin) % kHugePage == 0U);
    BOOST_TEST(during - before == (bytes + page - 1) / page * page);
    BOOST_TEST(after == before);
  }
}

BOOST_AUTO_TEST_CASE(only_whole_pages_are_discarded) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  HugeArray array(4 * page);
  const auto fill = [&] { std::fill_n(array.data(), array.bytes(), std::byte{7}); };
  const auto kept = [&] {
    return static_cast<std::size_t>(std::count(array.data(), array.data() + array.bytes(), std::byte{7}));
  };
  fill();
  array.discard(page - 1, 2 * page);
  BOOST_TEST(kept() == 3 * page);
  BOOST_TEST((array.data()[page - 1] == std::byte{7} && array.data()[page] == std::byte{0}));
  BOOST_TEST((array.data()[2 * page - 1] == std::byte{0} && array.data()[2 * page] == std::byte{7}));
  fill();
  array.discard(page, 2 * page);
  BOOST_TEST(kept() == 2 * page);
  fill();
  array.discard(1, 2 * page - 2);
  array.discard(1, page - 1);
  array.discard(page, 0);
  BOOST_TEST(kept() == 4 * page);
}

BOOST_AUTO_TEST_CASE(the_end_of_an_array_is_given_back) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  HugeArray array(4 * page + 1);
  array.data()[page] = std::byte{7};
  array.truncate(4 * page + 1);
  BOOST_TEST(array.bytes() == 4 * page + 1);
  array.truncate(page + 1);
  BOOST_TEST(array.bytes() == 2 * page);
  BOOST_TEST((array.data()[page] == std::byte{7}));
  array.truncate(2 * page);
  BOOST_TEST(array.bytes() == 2 * page);
  array.truncate(0);
  BOOST_TEST(array.bytes() == 0U);
  BOOST_TEST((array.data() == nullptr));
}

BOOST_AUTO_TEST_CASE(refused_memory_is_an_exception) {
  BOOST_CHECK_THROW(HugeArray(std::numeric_limits<std::size_t>::max() / 2), std::bad_alloc);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::huge_array_test
