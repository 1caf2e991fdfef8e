#include "adaptrt/core/huge_array.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <limits>
#include <new>
#include <utility>

namespace adaptrt::huge_array_test {
namespace {

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

BOOST_AUTO_TEST_CASE(refused_memory_is_an_exception) {
  BOOST_CHECK_THROW(HugeArray(std::numeric_limits<std::size_t>::max() / 2), std::bad_alloc);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::huge_array_test
