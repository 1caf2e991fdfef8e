#include "adaptrt/gpu/staged_copies.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "adaptrt/core/error.h"
#include "support/host_device.h"

namespace adaptrt::testing {
namespace {

std::vector<unsigned char> numbers(std::size_t count) {
  std::vector<unsigned char> result(count);
  std::iota(result.begin(), result.end(), static_cast<unsigned char>(1));
  return result;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(staged_copies)

// The stream runs its work when it is waited for: a half that is filled too early would change what is
// copied.
BOOST_AUTO_TEST_CASE(memory_of_any_size_is_copied_and_may_change_afterwards) {
  HostDevice device(std::size_t{1} << 20, StreamTime::kLate);
  const auto stream = device.make_stream();
  StagedCopies copies(device, *stream, 16);
  std::vector<Allocation> memory;
  const std::vector<std::size_t> sizes{0, 1, 16, 17, 100};
  for (const std::size_t size : sizes) {
    std::vector<unsigned char> source = numbers(size);
    memory.push_back(device.allocate(size + 1));
    copies.copy(memory.back().data(), std::as_bytes(std::span(source)));
    std::ranges::fill(source, static_cast<unsigned char>(0));
  }
  copies.finish();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::vector<unsigned char> found(sizes[i]);
    if (sizes[i] > 0) std::memcpy(found.data(), memory[i].data(), sizes[i]);
    BOOST_TEST(found == numbers(sizes[i]), boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(staging_memory_is_freed) {
  HostDevice device;
  const auto stream = device.make_stream();
  StagedCopies copies(device, *stream, 16);
  BOOST_TEST(device.num_allocations() == 2U);
  copies.finish();
  BOOST_TEST(device.num_allocations() == 0U);
}

BOOST_AUTO_TEST_CASE(errors_of_the_device_are_thrown) {
  HostDevice device;
  const auto stream = device.make_stream();
  device.fail("copy_to_device");
  StagedCopies copies(device, *stream, 16);
  const Allocation memory = device.allocate(16);
  const std::vector<unsigned char> source = numbers(16);
  BOOST_CHECK_THROW(copies.copy(memory.data(), std::as_bytes(std::span(source))), StepError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing
