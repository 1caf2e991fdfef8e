#include "adaptrt/gpu/device_pages.h"

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "support/host_device.h"

namespace adaptrt::testing::device_pages_test {
namespace {

constexpr std::size_t kPageBytes = 512;

/// Fills every page with a different byte.
AdapterPages::Write fill(int first) {
  return [first](std::size_t index, std::byte* page) {
    std::memset(page, first + static_cast<int>(index), kPageBytes);
    return kPageBytes;
  };
}

bool holds(const DevicePages& pages, std::int64_t page, int byte) {
  const std::vector<std::byte> expected(kPageBytes, static_cast<std::byte>(byte));
  return std::memcmp(pages.address(page), expected.data(), kPageBytes) == 0;
}

BOOST_AUTO_TEST_SUITE(device_pages)

BOOST_AUTO_TEST_CASE(pages_are_there_when_load_returns) {
  const auto device = std::make_shared<HostDevice>(1 << 20, StreamTime::kLate);
  DevicePages pages(device, kPageBytes, 6, 1);
  pages.load(std::vector<std::int64_t>{4, 1, 5}, fill(10));
  pages.load(std::vector<std::int64_t>{0}, fill(20));
  BOOST_TEST(holds(pages, 4, 10));
  BOOST_TEST(holds(pages, 1, 11));
  BOOST_TEST(holds(pages, 5, 12));
  BOOST_TEST(holds(pages, 0, 20));
  BOOST_TEST(device->owns(pages.address(0), 6 * kPageBytes));
}

BOOST_AUTO_TEST_CASE(loads_of_several_threads_do_not_mix) {
  const auto device = std::make_shared<HostDevice>(1 << 20, StreamTime::kLate);
  DevicePages pages(device, kPageBytes, 64, 2);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pages, t] {
      for (int round = 0; round < 20; ++round) {
        std::vector<std::int64_t> mine;
        for (std::int64_t i = 0; i <= round % 4; ++i) mine.push_back(t * 16 + i * 3);
        pages.load(mine, fill(t * 20 + round % 16));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 4; ++i) BOOST_TEST(holds(pages, t * 16 + i * 3, t * 20 + 3 + i));
  }
}

BOOST_AUTO_TEST_CASE(as_many_loads_run_as_there_are_streams) {
  const auto device = std::make_shared<HostDevice>(1 << 20);
  DevicePages pages(device, kPageBytes, 4, 2);
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;
  int most = 0;
  const AdapterPages::Write meet = [&](std::size_t, std::byte*) {
    std::unique_lock lock(mutex);
    most = std::max(most, ++running);
    changed.notify_all();
    // The first two wait for each other, so they must run at the same time.
    changed.wait(lock, [&] { return most == 2; });
    --running;
    return kPageBytes;
  };
  std::vector<std::thread> threads;
  for (std::int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&pages, &meet, t] { pages.load(std::vector<std::int64_t>{t}, meet); });
  }
  for (auto& thread : threads) thread.join();
  BOOST_TEST(most == 2);
}

BOOST_AUTO_TEST_CASE(a_failed_load_leaves_the_lane_for_the_next) {
  const auto device = std::make_shared<HostDevice>(1 << 20, StreamTime::kLate);
  DevicePages pages(device, kPageBytes, 4, 1);
  const std::vector<std::int64_t> two{0, 1};
  device->fail("copy_to_device", Failure::kOnce, 1);
  BOOST_CHECK_THROW(pages.load(two, fill(1)), StepError);
  device->fail("allocate_pinned");
  BOOST_CHECK_THROW(pages.load(std::vector<std::int64_t>{0, 1, 2}, fill(1)), StepError);
  BOOST_CHECK_THROW(
      pages.load(two, [](std::size_t, std::byte*) -> std::size_t { throw std::runtime_error("bad"); }),
      std::runtime_error);
  pages.load(std::vector<std::int64_t>{2, 3}, fill(7));
  BOOST_TEST(holds(pages, 2, 7));
  BOOST_TEST(holds(pages, 3, 8));
}

BOOST_AUTO_TEST_CASE(a_page_is_copied_while_the_next_one_is_written) {
  const auto device = std::make_shared<HostDevice>(1 << 20, StreamTime::kAtOnce);
  DevicePages pages(device, kPageBytes, 4, 1);
  std::memset(pages.address(0), 9, 4 * kPageBytes);
  pages.load(std::vector<std::int64_t>{3, 1, 2}, [&](std::size_t index, std::byte* page) {
    BOOST_TEST(device->calls("copy_to_device") == static_cast<std::int64_t>(index));
    std::memset(page, static_cast<int>(index), kPageBytes);
    return index == 0 ? kPageBytes : (2 - index) * 100;  // the last page has nothing
  });
  BOOST_TEST(device->calls("copy_to_device") == 2);
  BOOST_TEST(holds(pages, 3, 0));
  BOOST_TEST((pages.address(1)[99] == std::byte{1}));
  BOOST_TEST((pages.address(1)[100] == std::byte{9}));
  BOOST_TEST(holds(pages, 2, 9));
}

BOOST_AUTO_TEST_CASE(copies_of_a_lane_end_before_the_next_ones_begin) {
  const auto device = std::make_shared<HostDevice>(1 << 20, StreamTime::kLate);
  const auto arrivals = std::make_shared<AdapterArrivals>();
  DevicePages pages(device, kPageBytes, 4, 1, arrivals);
  const auto memory = pages.allocate_pinned(kPageBytes, 1 << 20);
  std::memset(memory.get(), 5, kPageBytes);
  BOOST_TEST(pages.pinned_bytes() >= kPageBytes);
  const std::vector<AdapterPages::Copy> copies{{2, 0, {memory.get(), 256}, 1},
                                               {3, 256, {memory.get() + 256, 256}, 4}};
  auto running = pages.begin_copies(7, copies);
  BOOST_TEST_REQUIRE(arrivals->find(7) != nullptr);
  BOOST_TEST(arrivals->find(7)->parts().size() == 2U);
  BOOST_TEST(arrivals->find(7)->parts()[1].position == 4);
  BOOST_TEST((pages.address(2)[0] != std::byte{5}));
  std::atomic<bool> has_begun = false;
  std::thread other([&] {
    const auto next = pages.begin_copies(8, copies);
    has_begun = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  BOOST_TEST(!has_begun);
  running->wait();
  BOOST_TEST((pages.address(2)[255] == std::byte{5} && pages.address(3)[256] == std::byte{5}));
  running = nullptr;
  other.join();
  BOOST_TEST(arrivals->find(7) == nullptr);
  BOOST_TEST(arrivals->find(8) == nullptr);
}

BOOST_AUTO_TEST_CASE(copies_that_nobody_awaits_end_before_their_memory_goes) {
  const auto device = std::make_shared<HostDevice>(1 << 20, StreamTime::kLate);
  DevicePages pages(device, kPageBytes, 4, 1);
  const auto memory = pages.allocate_pinned(kPageBytes, 1 << 20);
  std::memset(memory.get(), 5, kPageBytes);
  const std::vector<AdapterPages::Copy> copies{{2, 0, {memory.get(), kPageBytes}, 1}};
  static_cast<void>(pages.begin_copies(7, copies));
  BOOST_TEST(holds(pages, 2, 5));
  // A failure within begin_copies() leaves no copy behind.
  std::memset(memory.get(), 6, kPageBytes);
  device->fail("make_event");
  BOOST_CHECK_THROW(static_cast<void>(pages.begin_copies(8, copies)), StepError);
  BOOST_TEST(holds(pages, 2, 6));
}

BOOST_AUTO_TEST_CASE(memory_that_is_refused_is_a_config_error) {
  const auto device = std::make_shared<HostDevice>(1000);
  BOOST_CHECK_THROW(DevicePages(device, kPageBytes, 2, 1), ConfigError);
  BOOST_CHECK_THROW(DevicePages(device, std::size_t{1} << 40, std::int64_t{1} << 40, 1), ConfigError);
  BOOST_CHECK_THROW(DevicePages(device, kPageBytes, 1, 0), ConfigError);
  BOOST_TEST(device->num_allocations() == 0U);
  DevicePages none(device, kPageBytes, 0, 1);
  BOOST_TEST(none.num_pages() == 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::device_pages_test
