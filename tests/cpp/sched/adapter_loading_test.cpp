// Scheduling while load workers load adapters to the device.

#include <boost/test/unit_test.hpp>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing::adapter_loading_test {
namespace {

/// A world whose loads wait at a door.
struct LoadingWorld {
  explicit LoadingWorld(
      std::int64_t device_pages, SchedulerLimits limits = {}, HookedPages::Hook in_load = [] {},
      CapacitySchedulerPolicy policy = CapacitySchedulerPolicy::kGuaranteedNoEvict)
      : world(make_config(device_pages, limits, std::move(in_load), policy)) {}
  ~LoadingWorld() { door.open(); }

  /// Opens the door until this many loads have ended since the world was made.
  void await_loads(int count) {
    door.open();
    world.load_ends.await(count);
    door.shut();
  }
  /// Loads an adapter that no request uses.
  void load(const std::shared_ptr<const HostAdapter>& adapter) {
    const int before = world.load_ends.count();
    BOOST_TEST_REQUIRE((world.cache().ensure(*adapter, 1) == AdapterReadiness::kLoading));
    await_loads(before + 1);
  }
  [[nodiscard]] bool is_on_device(const Sequence& sequence) {
    for (const LoraCacheEntry& entry : world.cache().list()) {
      if (entry.task_id == sequence.adapter->task_id()) return entry.on_device;
    }
    return false;
  }

  Door door;
  World world;

 private:
  WorldConfig make_config(std::int64_t device_pages, SchedulerLimits limits, HookedPages::Hook in_load,
                          CapacitySchedulerPolicy policy) {
    door.shut();
    WorldConfig config{.num_blocks = 200, .policy = policy};
    if (limits.max_batch_size > 0) config.limits = limits;
    config.device_pages = device_pages;
    config.num_load_workers = 1;
    config.in_load = [this, in_load = std::move(in_load)] {
      door.pass();
      in_load();
    };
    return config;
  }
};

SchedulerLimits limits_of(std::int32_t max_batch_size, std::int32_t max_times_skipped = 16) {
  return {.max_batch_size = max_batch_size,
          .max_num_tokens = 32,
          .enable_chunked_context = true,
          .max_reusable_prompt_len = 1 << 20,
          .max_times_skipped = max_times_skipped};
}

bool waits(const Sequence& sequence) {
  return sequence.state == SequenceState::kWaiting;
}
bool has_begun(const Sequence& sequence) {
  return sequence.state == SequenceState::kRunning || sequence.state == SequenceState::kFinished;
}

BOOST_AUTO_TEST_SUITE(adapter_loading)

BOOST_AUTO_TEST_CASE(others_run_while_an_adapter_is_loaded) {
  LoadingWorld loading(2);
  World& world = loading.world;
  const auto resident = world.adapter(1);
  loading.load(resident);
  Sequence& cold = world.add(4, 2, {.adapter = world.adapter(2)});
  Sequence& hot = world.add(4, 3, {.adapter = resident});
  Sequence& base = world.add(4, 3);
  world.step();
  BOOST_TEST(waits(cold));
  BOOST_TEST(has_begun(hot));
  BOOST_TEST(has_begun(base));
  BOOST_TEST(world.plan.awaits_loads);
  BOOST_TEST(world.plan.unservable.empty());
  BOOST_TEST(cold.times_skipped == 0);  // its pages are available, so no request is held back for it
  loading.await_loads(2);
  world.step();
  BOOST_TEST(has_begun(cold));
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 3);
}

BOOST_AUTO_TEST_CASE(a_plan_with_nothing_but_loads_to_wait_for_says_so) {
  LoadingWorld loading(2);
  World& world = loading.world;
  Sequence& cold = world.add(4, 2, {.adapter = world.adapter(2)});
  world.plan_once();
  BOOST_TEST(world.plan.empty());
  BOOST_TEST(world.plan.awaits_loads);
  world.plan_once();
  BOOST_TEST(world.cache().stats().device_misses == 1);  // requested only once
  loading.await_loads(1);
  world.plan_once();
  BOOST_TEST(world.plans(cold));
  BOOST_TEST(!world.plan.awaits_loads);
}

BOOST_AUTO_TEST_CASE(adapters_of_those_that_come_next_are_loaded_while_the_batch_is_full) {
  LoadingWorld loading(8, limits_of(2));
  World& world = loading.world;
  world.add(4, 4);
  world.add(4, 4);
  std::vector<Sequence*> next;
  for (std::uint64_t id = 1; id <= 4; ++id) next.push_back(&world.add(4, 2, {.adapter = world.adapter(id)}));
  world.step();
  BOOST_TEST(world.cache().stats().loads_in_flight == 2);  // as many as could run at the same time
  loading.await_loads(2);
  BOOST_TEST(loading.is_on_device(*next[0]));
  BOOST_TEST(loading.is_on_device(*next[1]));
  world.step();
  BOOST_TEST(world.cache().stats().device_misses == 2);
  loading.door.open();
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 6);
}

BOOST_AUTO_TEST_CASE(nothing_is_evicted_for_a_request_that_comes_later) {
  LoadingWorld loading(2, limits_of(1));
  World& world = loading.world;
  const auto one = world.adapter(1);
  const auto two = world.adapter(2);
  loading.load(two);
  loading.load(one);
  world.add(4, 4);
  Sequence& first = world.add(4, 2, {.adapter = two});  // the least recently used
  Sequence& second = world.add(4, 2, {.adapter = world.adapter(3)});
  world.step();
  // With a batch size of one, only the first request is considered.
  BOOST_TEST(world.cache().stats().loads_in_flight == 0);
  while (waits(first)) world.step();
  BOOST_TEST(world.cache().stats().device_misses == 3);
  BOOST_TEST(world.cache().is_leased(*two));
  loading.await_loads(3);
  BOOST_TEST(loading.is_on_device(second));
  BOOST_TEST(world.cache().stats().device_evictions == 1);
  loading.door.open();
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(earlier_requests_keep_their_adapters_while_they_wait_for_blocks) {
  LoadingWorld loading(2, limits_of(4));
  World& world = loading.world;
  const auto one = world.adapter(1, 2);
  loading.load(one);
  world.add(400, 8);  // over several steps, in half of the blocks
  Sequence& first = world.add(700, 4, {.adapter = one});
  Sequence& second = world.add(4, 4, {.adapter = world.adapter(2)});
  world.step();
  BOOST_TEST(waits(first));
  BOOST_TEST(waits(second));
  BOOST_TEST(world.cache().stats().device_evictions == 0);
  BOOST_TEST(loading.is_on_device(first));
  while (waits(first)) world.step();
  loading.door.open();
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 3);
}

BOOST_AUTO_TEST_CASE(steps_that_adapters_hold_back_are_counted) {
  LoadingWorld loading(1, limits_of(2));
  World& world = loading.world;
  loading.door.open();
  const auto one = world.adapter(1);
  const auto two = world.adapter(2);
  world.add(4, 3, {.adapter = one});
  world.add(4, 3, {.adapter = one});
  world.load_ends.await(0);
  while (world.num_finished == 0) world.step();
  world.run_to_the_end();
  BOOST_TEST(world.cache().stats().steps_waiting_for_adapters == 0);  // both fit
  Sequence& running = world.add(4, 4, {.adapter = one});
  world.step();
  BOOST_TEST(has_begun(running));
  Sequence& held_back = world.add(4, 1, {.adapter = two});
  world.step();
  BOOST_TEST(waits(held_back));
  BOOST_TEST(world.plan.awaits_adapter_room);
  BOOST_TEST(world.cache().stats().steps_waiting_for_adapters == 1);
  world.run_to_the_end();
  const std::int64_t waited = world.cache().stats().steps_waiting_for_adapters;
  BOOST_TEST(waited > 1);
  // A full batch is not held back by adapters.
  world.add(4, 4, {.adapter = two});
  world.add(4, 4, {.adapter = two});
  Sequence& beyond = world.add(4, 1, {.adapter = one});
  while (waits(beyond) && world.cache().stats().loads_in_flight > 0) world.step();
  world.step();
  BOOST_TEST(waits(beyond));
  BOOST_TEST(world.cache().stats().steps_waiting_for_adapters == waited);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(an_adapter_that_keeps_being_skipped_is_not_starved_by_loads) {
  constexpr std::int32_t kMaxTimes = 3;
  LoadingWorld loading(3, limits_of(8, kMaxTimes));
  loading.door.open();
  World& world = loading.world;
  world.add(4, 6, {.adapter = world.adapter(1)});
  world.step();
  Sequence& waiting = world.add(4, 2, {.adapter = world.adapter(2, 3)});
  std::int32_t steps = 0;
  std::int32_t started = 0;
  std::uint64_t next_task = 10;
  while (waits(waiting)) {
    world.add(2, 6, {.adapter = world.adapter(next_task++)});  // each with a cold adapter
    world.step();
    started += static_cast<std::int32_t>(world.plan.started.size());
    BOOST_TEST_REQUIRE(++steps < 60);
  }
  BOOST_TEST(waiting.times_skipped == 0);
  // Requests held back at the limit start with it at the earliest.
  BOOST_TEST(started <= kMaxTimes + 2);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(a_failed_load_fails_those_that_wait_for_it_and_no_others) {
  bool fails = true;
  LoadingWorld loading(2, {}, [&] {
    if (fails) throw StepError("the bus is down");
  });
  World& world = loading.world;
  const auto cold = world.adapter(1);
  Sequence& first = world.add(4, 2, {.adapter = cold});
  Sequence& base = world.add(4, 6);
  Sequence& second = world.add(4, 2, {.adapter = cold});
  world.step();
  BOOST_TEST(has_begun(base));
  loading.await_loads(1);
  world.plan_once();
  BOOST_TEST_REQUIRE(world.plan.failed.size() == 2U);
  BOOST_TEST(world.plan.failed[0].sequence == &first);
  BOOST_TEST(world.plan.failed[1].sequence == &second);
  BOOST_TEST(world.plan.failed[0].reason == "the bus is down");
  BOOST_TEST(world.plans(base));
  BOOST_TEST(world.cache().stats().loads_in_flight == 0);  // not tried again for those requests
  world.cancel(first);
  world.cancel(second);
  world.run_planned();
  fails = false;
  Sequence& third = world.add(4, 2, {.adapter = cold});
  loading.door.open();
  world.run_to_the_end();
  BOOST_CHECK(third.state == SequenceState::kFinished);
  BOOST_TEST(world.num_finished == 2);
  BOOST_TEST(world.num_failed == 0);
}

BOOST_AUTO_TEST_CASE(without_workers_a_failed_load_fails_its_request) {
  bool fails = true;
  WorldConfig config{.device_pages = 2};
  config.in_load = [&] {
    if (fails) throw StepError("the bus is down");
  };
  World world(config);
  const auto cold = world.adapter(1);
  Sequence& failing = world.add(4, 2, {.adapter = cold});
  Sequence& base = world.add(4, 2);
  world.plan_once();
  BOOST_TEST_REQUIRE(world.plan.failed.size() == 1U);
  BOOST_TEST(world.plan.failed[0].sequence == &failing);
  BOOST_TEST(world.plans(base));
  world.cancel(failing);
  world.run_planned();
  fails = false;
  world.add(4, 2, {.adapter = cold});
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(a_static_batch_waits_for_the_adapters_on_their_way) {
  LoadingWorld loading(4, limits_of(3), [] {}, CapacitySchedulerPolicy::kStaticBatch);
  World& world = loading.world;
  world.add(4, 2, {.adapter = world.adapter(1)});
  world.add(4, 2);
  world.add(4, 2, {.adapter = world.adapter(2)});
  Sequence& next = world.add(4, 2, {.adapter = world.adapter(3)});
  world.plan_once();
  BOOST_TEST(world.plan.empty());
  BOOST_TEST(world.plan.awaits_loads);
  loading.await_loads(2);
  world.step();
  BOOST_TEST(world.plan.started.size() == 3U);
  world.step();  // the batch has ended; the next one's adapter was requested meanwhile
  BOOST_TEST(world.scheduler.running().empty());
  BOOST_TEST(world.cache().stats().device_misses == 3);
  loading.door.open();
  world.run_to_the_end();
  BOOST_CHECK(next.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(a_request_can_be_removed_while_its_adapter_is_loaded) {
  LoadingWorld loading(1);
  World& world = loading.world;
  Sequence& cold = world.add(4, 2, {.adapter = world.adapter(1)});
  world.plan_once();
  world.cancel(cold);
  world.cache().unload(1);
  Sequence& other = world.add(4, 2, {.adapter = world.adapter(2)});
  world.plan_once();
  BOOST_TEST(world.plan.awaits_loads);  // for the page of the removed one
  loading.door.open();
  world.run_to_the_end();
  BOOST_CHECK(other.state == SequenceState::kFinished);
  BOOST_TEST(world.cache().stats().host_adapters == 1);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::adapter_loading_test
