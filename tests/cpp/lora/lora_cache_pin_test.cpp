// Pins of adapters that are still to be loaded.

#include <boost/test/unit_test.hpp>
#include <future>
#include <thread>

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
  BOOST_TEST(!cache->is_leased(*loading));  // it is not there yet
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
  // Not kAwaitsLoads: the end of this load gives nothing back.
  BOOST_TEST((cache.ensure(large) == kNoRoom));
  cache.door.open();
  pin.get();
  BOOST_TEST((cache.ensure(large) == kNoRoom));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::lora_cache_pin_test
