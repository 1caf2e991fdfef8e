// Pins of adapters that are not loaded yet.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "busy_cache.h"

namespace adaptrt::lora_cache_pin_test {
namespace {

using namespace testing;
using enum AdapterReadiness;

BOOST_AUTO_TEST_SUITE(lora_cache_pin)

BOOST_AUTO_TEST_CASE(a_pin_waits_for_its_load) {
  BusyCache cache(2);
  cache.door.shut();
  (void)cache.admit(1);
  const auto loading = cache.admit(2);
  BOOST_TEST((cache.ensure(loading) == kLoading));
  auto first = std::async(std::launch::async, [&] { cache->pin(1); });
  auto second = std::async(std::launch::async, [&] { cache->pin(2); });
  while (cache->list().at(0).pinned == false || cache->list().at(1).pinned == false)
    std::this_thread::yield();
  BOOST_TEST(!cache->is_leased(*loading));  // not loaded yet
  cache.door.open();
  first.get();
  second.get();
  BOOST_TEST(cache->is_leased(*loading));
  BOOST_TEST(cache->obtainable_pages() == 0);
  check_weights(cache->acquire(loading), 2);
}

BOOST_AUTO_TEST_CASE(a_pin_that_is_taken_back_while_it_loads) {
  BusyCache cache(2);
  cache.door.shut();
  (void)cache.admit(1);
  (void)cache.admit(2);
  auto first = std::async(std::launch::async, [&] { cache->pin(1); });
  auto second = std::async(std::launch::async, [&] { cache->pin(2); });
  while (cache->list().at(0).pinned == false || cache->list().at(1).pinned == false)
    std::this_thread::yield();
  cache->unpin(1);
  cache->unload(2);
  cache.door.open();
  first.get();
  second.get();
  BOOST_TEST(cache->list().size() == 1U);
  BOOST_TEST(cache->obtainable_pages() == 2);
  BOOST_TEST(cache->stats().device_pages_used == 1);
}

BOOST_AUTO_TEST_CASE(a_pin_whose_load_fails_says_so_and_pins_nothing) {
  BusyCache cache(1, 1, [] { throw StepError("the bus is down"); });
  const auto adapter = cache.admit(1);
  BOOST_CHECK_EXCEPTION(cache->pin(1), StepError,
                        [](const StepError& error) { return contains(error.what(), "the bus is down"); });
  BOOST_TEST(!cache->list().at(0).pinned);
  BOOST_TEST(cache->obtainable_pages() == 1);
}

/// Starts two pins of adapter 1 while the door is shut; returns when both wait for its load, or one has
/// ended.
std::vector<std::future<void>> pin_twice(BusyCache& cache) {
  std::vector<std::future<void>> pins;
  for (int i = 0; i < 2; ++i) pins.push_back(std::async(std::launch::async, [&] { cache->pin(1); }));
  const auto has_ended = [](const std::future<void>& pin) {
    return pin.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  while (cache->list().at(0).users < 2 && std::ranges::none_of(pins, has_ended)) std::this_thread::yield();
  BOOST_TEST(std::ranges::none_of(pins, has_ended));
  return pins;
}

BOOST_AUTO_TEST_CASE(every_pin_waits_for_the_load) {
  BusyCache cache(1);
  (void)cache.admit(1);
  cache.door.shut();
  std::vector<std::future<void>> pins = pin_twice(cache);
  cache.door.open();
  for (auto& pin : pins) pin.get();
  BOOST_TEST(cache->stats().device_misses == 1);
  BOOST_TEST((cache->list().at(0).on_device && cache->list().at(0).pinned));
}

BOOST_AUTO_TEST_CASE(every_pin_that_waits_throws_what_the_load_threw) {
  bool fails = true;
  BusyCache cache(1, 1, [&] {
    if (fails) throw StepError("the bus is down");
  });
  (void)cache.admit(1);
  cache.door.shut();
  std::vector<std::future<void>> pins = pin_twice(cache);
  cache.door.open();
  for (auto& pin : pins) BOOST_CHECK_THROW(pin.get(), StepError);
  BOOST_TEST(cache->stats().failed_loads == 1);
  BOOST_TEST(!cache->list().at(0).pinned);
  fails = false;
  cache->pin(1);
  BOOST_TEST((cache->list().at(0).on_device && cache->list().at(0).pinned));
}

BOOST_AUTO_TEST_CASE(a_pin_loads_a_replacement_that_inherited_the_pin) {
  bool fails = false;
  BusyCache cache(2, 1, [&] {
    if (fails) throw StepError("the bus is down");
  });
  (void)cache.admit(1);
  cache->pin(1);
  const auto replacement = cache.admit(1, 7, true);
  BOOST_TEST((cache->list().at(0).pinned && !cache->list().at(0).on_device));
  fails = true;
  BOOST_CHECK_THROW(cache->pin(1), StepError);
  BOOST_TEST(!cache->list().at(0).pinned);
  fails = false;
  cache->pin(1);
  BOOST_TEST((cache->list().at(0).pinned && cache->list().at(0).on_device));
  check_weights(cache->acquire(replacement), 7);
}

BOOST_AUTO_TEST_CASE(without_workers_a_pin_tells_that_its_load_ended_even_in_vain) {
  int ends = 0;
  LoraCache cache(small_layout(),
                  std::make_unique<HookedPages>(kPageBytes, 1, [] { throw StepError("the bus is down"); }),
                  {.host_bytes = 1 << 20, .on_load_end = [&] { ++ends; }});
  (void)cache.admit(make_adapter({{LoraModule::kAttnQ, 0, 2, false}}, small_layout(), 1).send(1));
  BOOST_CHECK_THROW(cache.pin(1), StepError);
  BOOST_TEST(ends == 1);
}

BOOST_AUTO_TEST_CASE(a_pin_takes_its_pages_while_it_loads) {
  BusyCache cache(3);
  const auto large = cache.admit_large(1);
  const auto leased = cache.admit(2);
  cache.load(leased);
  const auto lease = cache->acquire(leased);
  (void)cache.admit(3);
  cache.door.shut();
  auto pin = std::async(std::launch::async, [&] { cache->pin(3); });
  while (cache->stats().loads_in_flight == 0) std::this_thread::yield();
  // The result is not kAwaitsLoads, because the end of this load frees no pages.
  BOOST_TEST((cache.ensure(large) == kNoRoom));
  cache.door.open();
  pin.get();
  BOOST_TEST((cache.ensure(large) == kNoRoom));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::lora_cache_pin_test
