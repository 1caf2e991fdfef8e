#include "adaptrt/gpu/pinned_slabs.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "support/host_device.h"

namespace adaptrt::testing::pinned_slabs_test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kMuch = std::size_t{1} << 30;

struct World {
  std::shared_ptr<HostDevice> device = std::make_shared<HostDevice>();
  std::shared_ptr<PinnedSlabs> slabs = std::make_shared<PinnedSlabs>(device);
  [[nodiscard]] std::int64_t num_slabs() const { return device->calls("allocate_pinned"); }
};

BOOST_AUTO_TEST_SUITE(pinned_slabs)

BOOST_AUTO_TEST_CASE(ranges_of_one_size_fill_slabs_without_gaps) {
  World world;
  std::vector<std::shared_ptr<std::byte>> ranges;
  for (int i = 0; i < 12; ++i) ranges.push_back(world.slabs->allocate(3 * kMiB, kMuch));
  BOOST_TEST(world.num_slabs() == 4);  // of 2, 2, 4 and 8 ranges
  BOOST_TEST(world.slabs->bytes() == 16 * 3 * kMiB);
  std::ranges::sort(ranges, {}, [](const auto& range) { return range.get(); });
  for (std::size_t i = 1; i < ranges.size(); ++i)
    BOOST_TEST((ranges[i].get() - ranges[i - 1].get() >= std::ptrdiff_t{3 * kMiB}));
  const std::byte* const freed = ranges[5].get();
  ranges[5] = nullptr;
  for (int i = 0; i < 4; ++i) ranges.push_back(world.slabs->allocate(3 * kMiB, kMuch));
  ranges[5] = world.slabs->allocate(3 * kMiB, kMuch);
  BOOST_TEST(world.num_slabs() == 4);
  BOOST_TEST(std::ranges::count(ranges, freed, [](const auto& range) { return range.get(); }) == 1);
}

BOOST_AUTO_TEST_CASE(neighbours_that_are_given_back_become_one_range) {
  // In each order: the middle last, first, and between.
  for (const std::vector<std::size_t>& order :
       std::vector<std::vector<std::size_t>>{{0, 2, 1}, {1, 0, 2}, {0, 1, 2}, {2, 1, 0}}) {
    World world;
    std::vector<std::shared_ptr<std::byte>> ranges;
    for (int i = 0; i < 4; ++i) ranges.push_back(world.slabs->allocate(2 * kMiB, 8 * kMiB));
    BOOST_TEST(world.num_slabs() == 1);
    const std::byte* const first = ranges[0].get();
    for (const std::size_t i : order) ranges[i] = nullptr;
    BOOST_TEST(world.slabs->allocate(6 * kMiB, 8 * kMiB).get() == first);
  }
}

BOOST_AUTO_TEST_CASE(slabs_never_exceed_the_maximum) {
  World world;
  auto one = world.slabs->allocate(5 * kMiB, 11 * kMiB);
  const auto two = world.slabs->allocate(5 * kMiB, 11 * kMiB);
  BOOST_TEST(world.slabs->bytes() == 10 * kMiB);
  BOOST_TEST(world.slabs->allocate(2 * kMiB, 11 * kMiB) == nullptr);
  BOOST_TEST(world.slabs->allocate(kMiB, 11 * kMiB) != nullptr);
  BOOST_TEST(world.slabs->allocate(12 * kMiB, 11 * kMiB) == nullptr);
  // A slab without ranges makes room; the other one stays.
  one = nullptr;
  const auto large = world.slabs->allocate(6 * kMiB, 11 * kMiB);
  BOOST_TEST(large != nullptr);
  BOOST_TEST(world.slabs->bytes() == 11 * kMiB);
  BOOST_TEST(two != nullptr);
}

BOOST_AUTO_TEST_CASE(a_system_that_pins_less_gives_less) {
  World world;
  world.device->limit_pinned(3 * kMiB);
  const auto one = world.slabs->allocate(2 * kMiB, kMuch);  // the slab of 8 MiB is refused
  BOOST_TEST(one != nullptr);
  BOOST_TEST(world.slabs->bytes() == 2 * kMiB);
  BOOST_TEST(world.slabs->allocate(2 * kMiB, kMuch) == nullptr);
  BOOST_TEST(world.slabs->bytes() == 2 * kMiB);
  world.device->limit_pinned(4 * kMiB);
  BOOST_TEST(world.slabs->allocate(2 * kMiB, kMuch) != nullptr);
}

BOOST_AUTO_TEST_CASE(ranges_outlive_the_slabs) {
  World world;
  auto range = world.slabs->allocate(kMiB, kMuch);
  world.slabs = nullptr;
  std::memset(range.get(), 1, kMiB);
  BOOST_TEST(world.device->num_allocations() == 1U);
  range = nullptr;
  BOOST_TEST(world.device->num_allocations() == 0U);
}

BOOST_AUTO_TEST_CASE(ranges_of_several_threads_do_not_overlap) {
  World world;
  const auto use = [&](int thread) {
    std::mt19937 random(static_cast<std::uint32_t>(thread));
    std::vector<std::pair<std::shared_ptr<std::byte>, std::size_t>> held;
    const auto mark = static_cast<std::byte>(thread + 1);
    for (int round = 0; round < 300; ++round) {
      const std::size_t bytes = 1000 + random() % 200'000;
      if (auto range = world.slabs->allocate(bytes, 12 * kMiB)) {
        std::fill_n(range.get(), bytes, mark);
        held.emplace_back(std::move(range), bytes);
      }
      if (held.size() > 20 || random() % 3 == 0) {
        if (held.empty()) continue;
        const auto [range, size] = held[random() % held.size()];
        if (std::count(range.get(), range.get() + size, mark) != static_cast<std::ptrdiff_t>(size)) {
          BOOST_ERROR("another thread wrote to the range");
        }
        held.erase(held.begin());
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(use, i);
  for (std::thread& thread : threads) thread.join();
  BOOST_TEST(world.slabs->bytes() <= 12 * kMiB);
  // Everything is one range again.
  BOOST_TEST(world.slabs->allocate(8 * kMiB, 12 * kMiB) != nullptr);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::pinned_slabs_test
