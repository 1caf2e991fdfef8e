// Loads in workers while other threads use the cache.

#include <boost/test/unit_test.hpp>
#include <new>

#include "adaptrt/core/error.h"
#include "busy_cache.h"

namespace adaptrt::lora_cache_load_test {
namespace {

using namespace testing;
using enum LoraModule;
using enum AdapterReadiness;

BOOST_AUTO_TEST_SUITE(lora_cache_load)

BOOST_AUTO_TEST_CASE(no_request_waits_for_a_load) {
  BusyCache cache(3);
  const auto here = cache.admit(1);
  cache.load(here);
  cache.door.shut();
  const auto adapter = cache.admit(2);
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.door.await_waiting(1);
  // While the worker is loading, all other calls work.
  BOOST_TEST(!cache->acquire(adapter).has_value());
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  check_weights(cache->acquire(here), 1);
  BOOST_TEST(cache.admit(3)->task_id() == 3U);
  BOOST_TEST(!cache->is_leased(*adapter));
  BOOST_TEST(cache->obtainable_pages() == 2);
  BOOST_TEST(cache->stats().loads_in_flight == 1);
  BOOST_TEST(cache->stats().device_adapters == 1);
  cache.door.open();
  cache.ends.await(2);
  BOOST_TEST((cache.ensure(adapter) == kReady));
  check_weights(cache->acquire(adapter), 2);
  const LoraCacheStats stats = cache->stats();
  BOOST_TEST(stats.loads_in_flight == 0);
  BOOST_TEST(stats.load_seconds > 0.0);
}

BOOST_AUTO_TEST_CASE(an_adapter_in_host_memory_is_ready_at_once) {
  int ends = 0;
  LoraCache cache(small_layout(), std::make_unique<HostPages>(kPageBytes, 1),
                  {.host_bytes = 1 << 20, .num_load_workers = 1, .on_load_end = [&] { ++ends; }});
  const auto admit = [&](std::uint64_t task_id) {
    const auto seed = static_cast<std::uint32_t>(task_id);
    return cache.admit(make_adapter({{LoraModule::kAttnQ, 0, 2, false}}, small_layout(), seed).send(task_id));
  };
  const auto one = admit(1);
  const auto two = admit(2);
  BOOST_TEST(!cache.acquire(one).has_value());  // it was not asked for
  BOOST_TEST((cache.ensure(*one, 1) == AdapterReadiness::kReady));
  BOOST_TEST((cache.ensure(*two, 1) == AdapterReadiness::kAwaitsOthers));
  BOOST_TEST((cache.ensure(*two, 2, false) == AdapterReadiness::kAwaitsOthers));
  check_weights(cache.acquire(one), 1);
  BOOST_TEST((cache.ensure(*two, 2) == AdapterReadiness::kReady));
  check_weights(cache.acquire(two), 2);
  BOOST_TEST((cache.ensure(*one, 3) == AdapterReadiness::kReady));
  const auto lease = cache.acquire(one);
  BOOST_TEST((cache.ensure(*two, 3) == AdapterReadiness::kNoRoom));
  const LoraCacheStats stats = cache.stats();
  BOOST_TEST(stats.device_misses == 3);
  BOOST_TEST(stats.device_evictions == 2);
  BOOST_TEST(stats.device_hits == 0);
  BOOST_TEST(stats.loads_in_flight == 0);
  BOOST_TEST(ends == 0);
  BOOST_TEST(cache.check_invariants().empty());
}

BOOST_AUTO_TEST_CASE(the_first_lease_after_a_load_is_no_hit) {
  BusyCache cache(2);
  const auto adapter = cache.admit(1);
  cache.load(adapter);
  (void)cache->acquire(adapter);
  BOOST_TEST(cache->stats().device_misses == 1);
  BOOST_TEST(cache->stats().device_hits == 0);
  (void)cache->acquire(adapter);
  BOOST_TEST(cache->stats().device_hits == 1);
}

BOOST_AUTO_TEST_CASE(without_workers_nothing_is_loaded_ahead) {
  LoraCache cache = make_host_cache(small_layout(), {1 << 20, kPageBytes, 1});
  BOOST_TEST(!cache.has_load_workers());
  const auto one = cache.admit(make_adapter({{kAttnQ, 0, 2, false}}, small_layout(), 1).send(1));
  const auto two = cache.admit(make_adapter({{kAttnQ, 0, 2, false}}, small_layout(), 2).send(2));
  BOOST_TEST((cache.ensure(*one, 1) == kReady));
  BOOST_TEST((cache.ensure(*two, 1) == kReady));
  BOOST_TEST(cache.stats().device_misses == 0);
  const auto lease = cache.acquire(one);
  BOOST_TEST((cache.ensure(*two, 2) == kNoRoom));
}

BOOST_AUTO_TEST_CASE(adapters_needed_earlier_in_a_turn_are_not_evicted) {
  BusyCache cache(2);
  const auto one = cache.admit(1);
  const auto two = cache.admit(2);
  const auto three = cache.admit(3);
  cache.load(one);
  cache.load(two);
  BOOST_TEST((cache.ensure(one, 7) == kReady));
  BOOST_TEST((cache.ensure(two, 7) == kReady));
  BOOST_TEST((cache.ensure(three, 7) == kAwaitsOthers));
  BOOST_TEST((cache.ensure(two, 8) == kReady));
  BOOST_TEST((cache.ensure(three, 8) == kLoading));  // evicts the first, although it was used later
  cache.ends.await(3);
  BOOST_TEST((cache.ensure(two, 9) == kReady));
  BOOST_TEST((cache.ensure(three, 9) == kReady));
  BOOST_TEST((cache.ensure(one, 9, false) == kAwaitsOthers));
  BOOST_TEST(cache->stats().device_evictions == 1);
}

BOOST_AUTO_TEST_CASE(an_expected_adapter_takes_no_place_of_the_newest_turn) {
  BusyCache cache(2);
  const auto one = cache.admit(1);
  const auto two = cache.admit(2);
  const auto three = cache.admit(3);
  const auto four = cache.admit(4);
  cache.load(one);
  cache.load(two);
  BOOST_TEST((cache.ensure(two, 7) == kReady));
  cache->expect(*three);  // evicts the first, which the turn does not need
  cache->expect(*four);   // no pages are left for it
  cache.ends.await(3);
  BOOST_TEST(cache->stats().device_misses == 3);
  BOOST_TEST((cache.ensure(two, 7) == kReady));
  BOOST_TEST((cache.ensure(three, 7) == kReady));
  cache->expect(*three);
  BOOST_TEST(cache->stats().device_misses == 3);
}

BOOST_AUTO_TEST_CASE(adapters_requested_in_a_turn_are_not_evicted_in_it) {
  BusyCache cache(2);
  const auto one = cache.admit(1);
  const auto two = cache.admit(2);
  const auto three = cache.admit(3);
  BOOST_TEST((cache.ensure(one, 7) == kLoading));
  cache.door.shut();
  BOOST_TEST((cache.ensure(two, 6) == kLoading));
  BOOST_TEST((cache.ensure(two, 7) == kLoading));
  cache.door.open();
  cache.ends.await(2);
  BOOST_TEST(
      (cache.ensure(three, 7) == kAwaitsOthers));  // neither the requested one nor the one that is loading
  BOOST_TEST(cache->stats().device_evictions == 0);
}

BOOST_AUTO_TEST_CASE(nothing_is_loaded_where_it_may_not_be) {
  BusyCache cache(2);
  const auto adapter = cache.admit(1);
  BOOST_TEST((cache.ensure(adapter, 1, false) == kAwaitsOthers));
  BOOST_TEST(cache->stats().device_misses == 0);
}

BOOST_AUTO_TEST_CASE(why_there_is_no_room) {
  BusyCache cache(2);
  const auto one = cache.admit(1);
  const auto large = cache.admit_large(2);
  cache.load(one);
  auto lease = cache->acquire(one);
  BOOST_TEST((cache.ensure(large) == kNoRoom));
  lease.reset();
  cache.door.shut();
  const auto three = cache.admit(3);
  BOOST_TEST((cache.ensure(three) == kLoading));
  BOOST_TEST((cache.ensure(large) == kAwaitsLoads));
  cache.door.open();
  cache.ends.await(2);
  BOOST_TEST((cache.ensure(large, 2) == kLoading));
  cache.ends.await(3);
  BOOST_TEST((cache.ensure(large, 3) == kReady));
}

BOOST_AUTO_TEST_CASE(workers_load_at_the_same_time) {
  BusyCache cache(4, 3);
  cache.door.shut();
  std::vector<std::shared_ptr<const HostAdapter>> adapters;
  for (std::uint64_t id = 1; id <= 4; ++id) {
    adapters.push_back(cache.admit(id));
    BOOST_TEST((cache.ensure(adapters.back()) == kLoading));
  }
  cache.door.await_waiting(3);
  BOOST_TEST(cache->stats().loads_in_flight == 4);
  cache.door.open();
  cache.ends.await(4);
  for (std::uint64_t id = 1; id <= 4; ++id) {
    check_weights(cache->acquire(adapters[id - 1]), static_cast<std::uint32_t>(id));
  }
}

BOOST_AUTO_TEST_CASE(a_load_that_fails_is_told_once_and_can_be_tried_again) {
  int loads = 0;
  BusyCache cache(1, 1, [&] {
    ++loads;
    if (loads == 1) throw StepError("the bus is down");
    if (loads == 2) throw std::bad_alloc();
    if (loads == 3) throw 42;
  });
  const auto adapter = cache.admit(1);
  const std::vector<std::string> says{"the bus is down", std::bad_alloc().what(), "unknown error"};
  for (int i = 0; i < 3; ++i) {
    BOOST_TEST((cache.ensure(adapter) == kLoading));
    cache.ends.await(i + 1);
    const auto failures = cache->take_load_failures();
    BOOST_TEST_REQUIRE(failures.size() == 1U);
    BOOST_TEST(failures[0].generation == adapter->generation());
    BOOST_TEST(failures[0].reason == says[static_cast<std::size_t>(i)]);
    BOOST_TEST(cache->take_load_failures().empty());
    BOOST_TEST(cache->stats().device_pages_used == 0);
    BOOST_TEST(cache->stats().failed_loads == i + 1);
    BOOST_TEST(!cache->acquire(adapter).has_value());
  }
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.ends.await(4);
  check_weights(cache->acquire(adapter), 1);
}

BOOST_AUTO_TEST_CASE(a_load_that_failed_is_not_tried_again_before_it_was_told) {
  BusyCache cache(1, 1, [] { throw StepError("the bus is down"); });
  const auto adapter = cache.admit(1);
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.ends.await(1);
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  BOOST_TEST(cache->stats().loads_in_flight == 0);
  BOOST_TEST(cache->take_load_failures().size() == 1U);
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.ends.await(2);
  BOOST_TEST(cache->stats().failed_loads == 2);
}

BOOST_AUTO_TEST_CASE(without_workers_a_load_that_fails_is_the_acquirer_s) {
  bool fails = true;
  LoraCache cache(small_layout(),
                  std::make_unique<HookedPages>(kPageBytes, 1,
                                                [&] {
                                                  if (fails) throw StepError("the bus is down");
                                                }),
                  {.host_bytes = 1 << 20});
  const auto adapter = cache.admit(make_adapter({{kAttnQ, 0, 2, false}}, small_layout(), 1).send(1));
  BOOST_CHECK_THROW((void)cache.acquire(adapter), StepError);
  BOOST_CHECK_THROW(cache.pin(1), StepError);
  BOOST_TEST(!cache.list().at(0).pinned);
  BOOST_TEST(cache.check_invariants().empty());
  BOOST_TEST(cache.obtainable_pages() == 1);
  BOOST_TEST(cache.take_load_failures().empty());
  fails = false;
  check_weights(cache.acquire(adapter), 1);
}

BOOST_AUTO_TEST_CASE(an_adapter_unloaded_while_it_loads_goes_after_its_last_holder) {
  BusyCache cache(3);
  cache.door.shut();
  auto in_the_middle = cache.admit(1);
  auto in_the_queue = cache.admit(2);
  auto held = cache.admit(3);
  for (const auto& adapter : {in_the_middle, in_the_queue, held}) {
    BOOST_TEST((cache.ensure(adapter) == kLoading));
  }
  cache.door.await_waiting(1);
  in_the_middle.reset();
  in_the_queue.reset();
  for (const std::uint64_t id : {1, 2, 3}) cache->unload(id);
  BOOST_TEST(cache->list().empty());
  BOOST_TEST(cache->stats().host_adapters == 3);
  BOOST_TEST(cache->stats().device_pages_used == 3);
  cache.door.open();
  cache.ends.await(3);
  BOOST_TEST(cache->stats().host_adapters == 1);
  BOOST_TEST(cache->stats().device_pages_used == 1);
  check_weights(cache->acquire(held), 3);
  held.reset();
  BOOST_TEST(cache->stats().host_adapters == 0);
  BOOST_TEST(cache->stats().device_pages_used == 0);
  BOOST_TEST(cache->stats().host_bytes_used == 0U);
}

BOOST_AUTO_TEST_CASE(a_generation_that_is_replaced_while_it_loads_serves_its_requests) {
  BusyCache cache(2);
  cache.door.shut();
  auto old = cache.admit(1, 1);
  BOOST_TEST((cache.ensure(old) == kLoading));
  cache.door.await_waiting(1);
  const auto fresh = cache.admit(1, 2, true);
  BOOST_TEST((cache.ensure(fresh) == kLoading));
  cache.door.open();
  cache.ends.await(2);
  check_weights(cache->acquire(old), 1);
  check_weights(cache->acquire(fresh), 2);
  old.reset();
  BOOST_TEST(cache->stats().device_pages_used == 1);
}

BOOST_AUTO_TEST_CASE(a_load_for_a_request_that_has_gone_is_there_for_the_next) {
  BusyCache cache(1);
  cache.door.shut();
  auto adapter = cache.admit(1);
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  adapter.reset();
  cache.door.open();
  cache.ends.await(1);
  adapter = cache.admit(1);
  BOOST_TEST((cache.ensure(adapter) == kReady));
  BOOST_TEST(cache->obtainable_pages() == 1);
}

BOOST_AUTO_TEST_CASE(the_cache_goes_while_it_loads) {
  std::shared_ptr<const HostAdapter> one;
  std::shared_ptr<const HostAdapter> two;
  std::optional<DeviceLease> lease;
  {
    BusyCache cache(3);
    const auto three = cache.admit(3);
    cache.load(three);
    lease = cache->acquire(three);
    cache.door.shut();
    one = cache.admit(1);
    two = cache.admit(2);
    BOOST_TEST((cache.ensure(one) == kLoading));
    BOOST_TEST((cache.ensure(two) == kLoading));
    cache.door.await_waiting(1);
  }
  check_weights(lease, 3);
  BOOST_TEST(two->task_id() == 2U);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::lora_cache_load_test
