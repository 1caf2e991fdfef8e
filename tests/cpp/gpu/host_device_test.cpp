// The test device must detect the faults that tests rely on it to find.
#include "support/host_device.h"

#include <boost/test/unit_test.hpp>
#include <memory>
#include <stdexcept>
#include <vector>

namespace adaptrt::testing::host_device_test {
namespace {

struct Fixture {
  HostDevice device;
  std::unique_ptr<Stream> stream = device.make_stream();
  Allocation memory = device.allocate(64);
  Allocation pinned = device.allocate_pinned(64);
};

BOOST_FIXTURE_TEST_SUITE(host_device, Fixture)

BOOST_AUTO_TEST_CASE(copies_must_be_between_pinned_memory_and_the_device) {
  std::vector<std::byte> pageable(64);
  BOOST_CHECK_THROW(stream->copy_to_device(memory.data(), pageable.data(), 64), std::logic_error);
  BOOST_CHECK_THROW(stream->copy_to_host(pageable.data(), memory.data(), 64), std::logic_error);
  BOOST_CHECK_THROW(stream->copy_to_device(pinned.data(), memory.data(), 64), std::logic_error);
  BOOST_CHECK_THROW(stream->copy_to_device(memory.data(), pinned.data(), 65), std::logic_error);
  BOOST_CHECK_NO_THROW(stream->copy_to_device(memory.data() + 60, pinned.data(), 4));
}

BOOST_AUTO_TEST_CASE(copies_must_not_use_memory_that_is_gone) {
  const std::byte* gone = pinned.data();
  pinned = {};
  BOOST_CHECK_THROW(stream->copy_to_device(memory.data(), gone, 4), std::logic_error);
}

BOOST_AUTO_TEST_CASE(memory_must_stay_until_a_late_copy_is_done) {
  HostDevice late(std::size_t{1} << 20, StreamTime::kLate);
  const auto late_stream = late.make_stream();
  const Allocation to = late.allocate(4);
  Allocation from = late.allocate_pinned(4);
  late_stream->copy_to_device(to.data(), from.data(), 4);
  from = {};
  BOOST_CHECK_THROW(late_stream->synchronize(), std::logic_error);
}

BOOST_AUTO_TEST_CASE(captured_work_runs_at_each_launch_and_not_before) {
  int runs = 0;
  const auto graph = stream->capture([&] { submit(host_stream(stream->handle()), [&] { ++runs; }); });
  BOOST_TEST(runs == 0);
  stream->launch(*graph);
  stream->launch(*graph);
  BOOST_TEST(runs == 2);
}

BOOST_AUTO_TEST_CASE(a_stream_waits_for_the_work_before_an_event) {
  std::vector<int> order;  // the streams do the rest of their work when they are destroyed
  HostDevice late(std::size_t{1} << 20, StreamTime::kLate);
  const auto first = late.make_stream();
  const auto second = late.make_stream();
  const auto event = late.make_event();
  submit(host_stream(first->handle()), [&] { order.push_back(1); });
  first->record(*event);
  submit(host_stream(first->handle()), [&] { order.push_back(3); });
  second->wait(*event);
  submit(host_stream(second->handle()), [&] { order.push_back(2); });
  second->synchronize();
  BOOST_TEST(order == (std::vector<int>{1, 2}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::host_device_test
