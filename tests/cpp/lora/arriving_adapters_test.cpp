// Adapters that are copied from pinned memory, and leased while their copies run.

#include <algorithm>
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "busy_cache.h"
#include "pinned_pages.h"

namespace adaptrt::arriving_adapters_test {
namespace {

using namespace testing;
using enum LoraModule;
using enum AdapterReadiness;

/// A cache whose copies wait at a door. Its invariants are checked at every use.
struct ArrivalCache {
  explicit ArrivalCache(std::int64_t pages, std::int32_t num_workers = 1, std::size_t host_bytes = 1 << 20,
                        LoraLayout layout = small_layout()) {
    log.in_wait = [this] {
      door.pass();
      if (fails.exchange(false)) throw StepError("a copy failed");
    };
    cache.emplace(std::move(layout), std::make_unique<PinnedPages>(kPageBytes, pages, log),
                  LoraCacheOptions{.host_bytes = host_bytes,
                                   .num_load_workers = num_workers,
                                   .on_load_end = [this] { ends.add(); }});
  }
  ~ArrivalCache() {
    check();
    door.open();
    cache.reset();
    BOOST_TEST(log.pinned == 0U);
  }
  ArrivalCache(const ArrivalCache&) = delete;
  ArrivalCache& operator=(const ArrivalCache&) = delete;

  LoraCache* operator->() {
    check();
    return &*cache;
  }
  void check() const {
    for (const std::string& broken : cache->check_invariants()) BOOST_ERROR(broken);
  }
  std::shared_ptr<const HostAdapter> admit(std::uint64_t task_id, std::uint32_t seed, bool replace = false) {
    return (*this)->admit(make_adapter({{kAttnQ, 0, 2, false}}, small_layout(), seed).send(task_id, replace));
  }
  std::shared_ptr<const HostAdapter> admit(std::uint64_t task_id) {
    return admit(task_id, static_cast<std::uint32_t>(task_id));
  }
  AdapterReadiness ensure(const std::shared_ptr<const HostAdapter>& adapter, std::uint64_t turn = 1) {
    return (*this)->ensure(*adapter, turn);
  }
  /// Begins the load of an adapter whose copies wait at the door.
  void let_arrive(const std::shared_ptr<const HostAdapter>& adapter) {
    door.shut();
    BOOST_TEST_REQUIRE((ensure(adapter) == kLoading));
    door.await_waiting(1);
  }
  /// Opens the door and returns after the load.
  void finish() {
    door.open();
    while ((*this)->stats().loads_in_flight > 0) std::this_thread::yield();
  }
  [[nodiscard]] std::size_t pinned() {
    const std::lock_guard lock(log.mutex);
    return log.pinned;
  }

  PinnedPages::Log log;
  Door door;
  Counter ends;
  std::atomic<bool> fails = false;  // the next copy
  std::optional<LoraCache> cache;
};

BOOST_AUTO_TEST_SUITE(arriving_adapters)

BOOST_AUTO_TEST_CASE(an_adapter_is_leased_while_its_copies_run) {
  ArrivalCache cache(1);
  const auto adapter = cache.admit(1);
  BOOST_TEST(adapter->is_pinned());
  cache.let_arrive(adapter);
  BOOST_TEST(cache.ends.count() == 1);
  BOOST_TEST((cache.ensure(adapter) == kReady));
  const auto lease = cache->acquire(adapter);
  BOOST_TEST_REQUIRE(lease.has_value());
  BOOST_TEST(cache->stats().loads_in_flight == 1);
  BOOST_TEST(cache->stats().device_hits == 0);
  cache.finish();
  check_weights(lease, 1);
  BOOST_TEST(cache->stats().staged_loads == 0);
  BOOST_TEST(cache->stats().load_seconds > 0.0);
  BOOST_TEST(cache->stats().pinned_bytes == adapter->bytes());
  BOOST_TEST(cache.log.staged == 0);
  cache.ends.await(2);
  check_weights(cache->acquire(adapter), 1);
  BOOST_TEST(cache->stats().device_hits == 1);
}

BOOST_AUTO_TEST_CASE(pages_and_host_memory_stay_until_the_copies_are_done) {
  ArrivalCache cache(1);
  auto adapter = cache.admit(1);
  auto other = cache.admit(2);
  const std::size_t both = cache.pinned();
  cache.let_arrive(adapter);
  static_cast<void>(cache->acquire(adapter));  // as a request that is cancelled
  BOOST_TEST((cache.ensure(other) == kAwaitsLoads));
  BOOST_TEST(cache->stats().device_evictions == 0);
  cache->unload(1);
  adapter = nullptr;
  BOOST_TEST(cache.pinned() == both);
  BOOST_TEST(cache->stats().host_adapters == 2);
  cache.finish();
  while (cache->stats().host_adapters > 1) std::this_thread::yield();
  BOOST_TEST(cache.pinned() == both / 2);
  BOOST_TEST((cache.ensure(other, 2) == kLoading));
  cache.ends.await(4);
  check_weights(cache->acquire(other), 2);
}

BOOST_AUTO_TEST_CASE(an_adapter_is_replaced_while_its_copies_run) {
  ArrivalCache cache(2);
  const auto adapter = cache.admit(1);
  cache.let_arrive(adapter);
  auto lease = cache->acquire(adapter);
  const auto replacement = cache.admit(1, 7, /*replace=*/true);
  BOOST_TEST((cache.ensure(replacement) == kLoading));
  cache.finish();
  check_weights(lease, 1);
  check_weights(cache->acquire(replacement), 7);
}

BOOST_AUTO_TEST_CASE(a_leased_adapter_gives_no_pages_when_its_copies_end) {
  ArrivalCache cache(1);
  const auto adapter = cache.admit(1);
  const auto other = cache.admit(2);
  cache.let_arrive(adapter);
  const auto lease = cache->acquire(adapter);
  BOOST_TEST((cache.ensure(other) == kNoRoom));
  cache.finish();
  BOOST_TEST((cache.ensure(other) == kNoRoom));
}

BOOST_AUTO_TEST_CASE(copies_that_fail_keep_the_pages_of_leased_adapters) {
  ArrivalCache cache(1);
  const auto adapter = cache.admit(1);
  cache.let_arrive(adapter);
  auto lease = cache->acquire(adapter);
  cache.fails = true;
  cache.finish();
  cache.ends.await(2);
  BOOST_TEST(cache->stats().failed_loads == 1);
  BOOST_TEST(cache->stats().device_pages_used == 1);
  BOOST_TEST(lease->adapter().task_id == 1U);
  BOOST_TEST(!cache->acquire(adapter).has_value());
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  BOOST_TEST(cache->stats().loads_in_flight == 0);
  const auto failures = cache->take_load_failures();
  BOOST_TEST_REQUIRE(failures.size() == 1U);
  BOOST_TEST(failures[0].reason == "a copy failed");
  lease.reset();
  BOOST_TEST(cache->stats().device_pages_used == 0);
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.ends.await(4);
  check_weights(cache->acquire(adapter), 1);
}

BOOST_AUTO_TEST_CASE(copies_that_fail_unleased_give_the_pages_back) {
  ArrivalCache cache(1);
  const auto adapter = cache.admit(1);
  cache.fails = true;
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.ends.await(2);
  BOOST_TEST(cache->stats().device_pages_used == 0);
  BOOST_TEST(cache->take_load_failures().size() == 1U);
  cache.log.before_copies = [] { throw StepError("the bus is down"); };
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.ends.await(3);  // it never arrived
  BOOST_TEST(cache->take_load_failures().at(0).reason == "the bus is down");
  BOOST_TEST(cache->stats().device_pages_used == 0);
}

BOOST_AUTO_TEST_CASE(a_pin_waits_until_the_copies_are_done) {
  ArrivalCache cache(2);
  (void)cache.admit(1);
  cache.door.shut();
  auto pin = std::async(std::launch::async, [&] { cache.cache->pin(1); });
  cache.door.await_waiting(1);
  BOOST_TEST((pin.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout));
  cache.door.open();
  pin.get();
  BOOST_TEST(cache->list().at(0).on_device);
  // One whose copies fail is not pinned, leased or not.
  const auto adapter = cache.admit(2);
  cache.door.shut();
  pin = std::async(std::launch::async, [&] { cache.cache->pin(2); });
  cache.door.await_waiting(1);
  const auto lease = cache->acquire(adapter);
  cache.fails = true;
  cache.door.open();
  BOOST_CHECK_THROW(pin.get(), StepError);
  BOOST_TEST(!cache->list().at(1).pinned);
  static_cast<void>(cache->take_load_failures());
}

BOOST_AUTO_TEST_CASE(without_workers_a_lease_comes_after_the_copies) {
  ArrivalCache cache(1, 0);
  const auto adapter = cache.admit(1);
  check_weights(cache->acquire(adapter), 1);
  BOOST_TEST(cache.ends.count() == 0);
  cache->pin(1);
  BOOST_TEST(cache->stats().failed_loads == 0);
}

BOOST_AUTO_TEST_CASE(memory_that_is_not_pinned_is_staged) {
  ArrivalCache cache(2);
  const auto pinned = cache.admit(1);
  cache.log.most_pinned = 0;
  const auto adapter = cache.admit(2);
  BOOST_TEST((pinned->is_pinned() && !adapter->is_pinned()));
  BOOST_TEST((cache.ensure(adapter) == kLoading));
  cache.ends.await(1);
  check_weights(cache->acquire(adapter), 2);
  BOOST_TEST((cache->stats().staged_loads == 1 && cache.log.staged == 1));
  BOOST_TEST(cache->stats().pinned_bytes == pinned->bytes());
  BOOST_TEST((cache.ensure(pinned) == kLoading));
  cache.ends.await(3);
  check_weights(cache->acquire(pinned), 1);
  BOOST_TEST((cache->stats().staged_loads == 1 && cache.log.staged == 1));
}

BOOST_AUTO_TEST_CASE(an_adapter_that_is_admitted_may_be_pinned_on_top_of_the_level) {
  const std::size_t bytes = [] {
    ArrivalCache cache(1);
    return cache.admit(1)->bytes();
  }();
  ArrivalCache cache(1, 1, 2 * bytes + 1);
  for (const std::uint64_t task_id : {1, 2, 3, 4}) BOOST_TEST(cache.admit(task_id)->is_pinned());
  BOOST_TEST(cache.log.allowed == std::vector<std::size_t>(4, 3 * bytes + 1));
  BOOST_TEST(cache.pinned() == 2 * bytes);
  // One that is larger than the level is refused without memory.
  const SentAdapter large =
      make_adapter({{kMlpGateUp, 0, 7, true}, {kMlpGateUp, 1, 7, true}}, small_layout());
  BOOST_CHECK_THROW(static_cast<void>(cache->admit(large.send(9))), LoraCacheFullError);
  BOOST_TEST(cache.log.allowed.size() == 4U);
}

BOOST_AUTO_TEST_CASE(copies_are_those_of_the_images_in_the_order_of_layers) {
  // Some images of layer 1 lie in a page before those of others, where there was room.
  ArrivalCache cache(3, 0);
  const SentAdapter sent = make_adapter(
      {{kAttnQ, 0, 2, false}, {kMlpGateUp, 0, 7, true}, {kMlpGateUp, 1, 7, true}, {kMlp4HToH, 1, 2, false}},
      small_layout(), 5);
  const auto adapter = cache->admit(sent.send(1));
  const auto lease = cache->acquire(adapter);
  const LoraLayout layout = small_layout();
  const auto& copies = cache.log.copies;
  const DevicePlan& plan = adapter->plan();
  BOOST_TEST_REQUIRE(plan.used_bytes.size() > 1U);
  std::size_t bytes = 0;
  std::vector<int> layers;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    bytes += copies[i].from.size();
    if (i > 0) BOOST_TEST(copies[i].position > copies[i - 1].position);
    layers.push_back(layout.sites[static_cast<std::size_t>(copies[i].position - 1)].layer);
  }
  BOOST_TEST(bytes == plan.bytes());
  BOOST_TEST(layers.front() == 0);
  BOOST_TEST(layers.back() == 1);
  BOOST_TEST(std::ranges::is_sorted(layers));
  // Each image lies in the copy of its position.
  for (const DevicePlan::Site& site : plan.sites) {
    const auto after =
        std::ranges::upper_bound(copies, load_position(layout, site.site), {}, &AdapterPages::Copy::position);
    BOOST_TEST_REQUIRE((after != copies.begin()));
    const AdapterPages::Copy& copy = *std::prev(after);
    const std::byte* image =
        adapter->packed_page(static_cast<std::size_t>(site.place.page)) + site.place.offset;
    BOOST_TEST((image >= copy.from.data() && image < copy.from.data() + copy.from.size()));
    BOOST_TEST(site.place.offset - copy.offset == static_cast<std::size_t>(image - copy.from.data()));
  }
  BOOST_TEST(!std::ranges::is_sorted(copies, {}, &AdapterPages::Copy::page));
  BOOST_TEST(unpack_adapter(lease->adapter(), layout).size() == 6U);
}

BOOST_AUTO_TEST_CASE(pinned_and_staged_copies_have_the_same_weights) {
  const SentAdapter sent = make_adapter(
      {{kAttnQkv, 0, 8, true}, {kMlpGateUp, 0, 7, true}, {kMlpGateUp, 1, 8, true}, {kMlp4HToH, 1, 8, false}},
      small_layout(), 5);
  std::vector<std::vector<UnpackedModule>> found;
  for (const bool is_pinned : {true, false}) {
    ArrivalCache cache(3, 0);
    if (!is_pinned) cache.log.most_pinned = 0;
    const auto adapter = cache->admit(sent.send(1));
    BOOST_TEST(adapter->is_pinned() == is_pinned);
    found.push_back(unpack_adapter(cache->acquire(adapter)->adapter(), small_layout()));
  }
  BOOST_TEST_REQUIRE(found[0].size() == found[1].size());
  for (std::size_t i = 0; i < found[0].size(); ++i) {
    BOOST_TEST(found[0][i].a == found[1][i].a);
    BOOST_TEST(found[0][i].b == found[1][i].b);
    BOOST_TEST(found[0][i].magnitude == found[1][i].magnitude);
  }
}

BOOST_AUTO_TEST_CASE(several_threads_admit_as_one_does) {
  const LoraLayout layout = small_layout();
  const auto admitted = [&](const SentAdapter& sent, std::int32_t num_threads) {
    return HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), kPageBytes, nullptr,
                                    LoraStorage::kExact, {}, num_threads);
  };
  SentAdapter sent = make_adapter({{kAttnQkv, 0, 8, true},
                                   {kMlpGateUp, 0, 7, true},
                                   {kMlp4HToH, 0, 8, false},
                                   {kAttnDense, 1, 3, false},
                                   {kMlpGateUp, 1, 8, true}},
                                  layout, 5);
  const auto one = admitted(sent, 1);
  for (const std::int32_t num_threads : {2, 3, 8}) {
    BOOST_TEST(admitted(sent, num_threads)->same_weights(*one));
  }
  for (const std::size_t row : {0U, 2U, 4U}) sent.set(row, 3, std::numeric_limits<float>::infinity());
  sent.set(1, sent.width - 1, 1.0F);
  sent.set(4, 11, std::numeric_limits<float>::quiet_NaN());
  const auto problems = [&](std::int32_t num_threads) {
    try {
      static_cast<void>(admitted(sent, num_threads));
    } catch (const AdapterError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string expected = problems(1);
  for (const char* row : {"row 0", "row 1", "row 2", "row 4"}) BOOST_TEST(contains(expected, row));
  for (const std::int32_t num_threads : {2, 3, 8}) BOOST_TEST(problems(num_threads) == expected);
}

BOOST_AUTO_TEST_CASE(new_tokens_are_copied_first) {
  LoraLayout layout = small_layout();
  layout.max_extra_tokens = 4;
  layout.target_modules.push_back(kNewTokens);
  layout.sites.push_back({0, 8, {{kNewTokens, 8}}});
  ArrivalCache cache(2, 0, 1 << 20, layout);
  const SentAdapter sent = make_adapter({{kAttnQ, 0, 2, false}, {kNewTokens, 0, 3, false}}, layout, 1);
  const auto adapter = cache->admit(sent.send(1));
  const auto lease = cache->acquire(adapter);
  BOOST_TEST_REQUIRE(cache.log.copies.size() == 2U);
  BOOST_TEST(cache.log.copies[0].position == 0);
  BOOST_TEST(cache.log.copies[1].position == 1);
  BOOST_TEST(cache.log.copies[0].offset > cache.log.copies[1].offset);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::arriving_adapters_test
