#include <boost/test/unit_test.hpp>

#include "world.h"

namespace adaptrt::testing::adapter_scheduling_test {
namespace {

WorldConfig with_pages(std::int64_t device_pages, std::int32_t max_times_skipped = 16) {
  WorldConfig config{.num_blocks = 200, .device_pages = device_pages};
  config.limits.max_times_skipped = max_times_skipped;
  return config;
}

BOOST_AUTO_TEST_SUITE(adapter_scheduling)

BOOST_AUTO_TEST_CASE(a_running_sequence_leases_its_adapter_until_it_ends) {
  World world(with_pages(2));
  auto adapter = world.adapter(7, 2);
  Sequence& first = world.add(4, 3, {.adapter = adapter});
  Sequence& second = world.add(4, 5, {.adapter = adapter});
  BOOST_TEST(!world.cache().is_leased(*adapter));
  world.step();
  BOOST_TEST_REQUIRE(first.device_adapter() != nullptr);
  BOOST_TEST(first.device_adapter()->task_id == 7U);
  BOOST_TEST(world.plan.entries.size() == 2U);  // both use the same pages
  while (first.state == SequenceState::kRunning) world.step();
  BOOST_TEST(world.cache().is_leased(*adapter));
  while (second.state == SequenceState::kRunning) world.step();
  BOOST_TEST(!world.cache().is_leased(*adapter));
}

BOOST_AUTO_TEST_CASE(a_sequence_whose_adapter_gets_no_pages_is_no_barrier) {
  World world(with_pages(2));
  Sequence& running = world.add(4, 6, {.adapter = world.adapter(1, 2)});
  world.step();
  Sequence& skipped = world.add(4, 1, {.adapter = world.adapter(2, 1)});
  Sequence& base = world.add(4, 1);
  world.step();
  BOOST_CHECK(skipped.state == SequenceState::kWaiting);
  BOOST_CHECK(base.state == SequenceState::kFinished);
  BOOST_TEST(world.plan.unservable.empty());
  while (running.state == SequenceState::kRunning) world.step();
  world.step();
  BOOST_CHECK(skipped.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(an_adapter_that_keeps_being_skipped_is_not_starved) {
  constexpr std::int32_t kMaxTimes = 3;
  World world(with_pages(2, kMaxTimes));
  auto hot = world.adapter(1, 1);
  auto large = world.adapter(2, 2);
  world.add(4, 6, {.adapter = hot});
  world.step();
  Sequence& waiting = world.add(4, 2, {.adapter = large});
  std::int32_t steps = 0;
  std::int32_t started = 0;
  while (waiting.state == SequenceState::kWaiting) {
    world.add(2, 6, {.adapter = hot});  // would never release the pages
    world.step();
    started += static_cast<std::int32_t>(world.plan.started.size());
    BOOST_TEST_REQUIRE(++steps < 30);
  }
  BOOST_TEST(started == kMaxTimes + 1);  // including the one that waited
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(base_requests_go_on_while_adapters_are_held_back) {
  World world(with_pages(1, 0));
  auto hot = world.adapter(1);
  world.add(4, 6, {.adapter = hot});
  world.step();
  Sequence& waiting = world.add(4, 2, {.adapter = world.adapter(2)});
  Sequence& same_as_running = world.add(4, 2, {.adapter = hot});
  Sequence& base = world.add(4, 2);
  world.step();
  BOOST_CHECK(waiting.state == SequenceState::kWaiting);
  BOOST_CHECK(same_as_running.state == SequenceState::kWaiting);
  BOOST_CHECK(base.state == SequenceState::kRunning);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 4);
}

BOOST_AUTO_TEST_CASE(a_preempted_sequence_gives_up_its_lease) {
  auto config = with_pages(2);
  config.num_blocks = 8;
  config.policy = CapacitySchedulerPolicy::kMaxUtilization;
  World world(config);
  auto adapter = world.adapter(2);
  world.add(8, 16, {.adapter = world.adapter(1)});
  Sequence& second = world.add(8, 16, {.adapter = adapter});
  world.step();
  BOOST_TEST(world.cache().is_leased(*adapter));
  while (!second.preempted) world.step();
  BOOST_TEST(!world.cache().is_leased(*adapter));
  BOOST_TEST(second.device_adapter() == nullptr);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(pages_are_not_taken_for_a_request_without_blocks) {
  auto config = with_pages(1);
  config.num_blocks = 8;
  World world(config);
  world.add(8, 10);
  world.step();
  auto resident = world.adapter(1);
  world.add(4, 1, {.adapter = resident});
  world.step();
  const auto misses = world.cache().stats().device_misses;
  Sequence& large = world.add(28, 2, {.adapter = world.adapter(2)});
  world.step();
  BOOST_CHECK(large.state == SequenceState::kWaiting);
  BOOST_TEST(world.cache().stats().device_misses == misses);
  BOOST_TEST(world.cache().stats().device_evictions == 0);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(an_adapter_s_kv_is_its_own) {
  World world(with_pages(4));
  std::vector<std::int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  auto adapter = world.adapter(1);
  world.add(prompt, 2);
  world.run_to_the_end();
  world.add(prompt, 2, {.adapter = adapter});
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 0);
  world.run_to_the_end();
  world.add(prompt, 2, {.adapter = world.adapter(2)});
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 0);
  world.run_to_the_end();
  world.add(prompt, 2, {.adapter = adapter});
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 8);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::adapter_scheduling_test
