#include "adaptrt/lora/lora_cache.h"

#include <boost/test/unit_test.hpp>

#include "adapters.h"
#include "adaptrt/core/error.h"
#include "adaptrt/lora/pack_adapter.h"
#include "hooked_pages.h"

namespace adaptrt::lora_cache_test {
namespace {

using namespace testing;
using enum LoraModule;

constexpr std::size_t kPageBytes = 8192;  // the largest image of small_layout() has 5632 bytes
// attn_q of layer 0 at rank 2: A[2, 8] and B[6, 2] of float32 in pieces of 64 bytes, one page on the device.
constexpr std::size_t kSmallBytes = 2 * 64;

SentAdapter small(std::uint32_t seed) {
  return make_adapter({{kAttnQ, 0, 2, false}}, small_layout(), seed);
}

/// Makes an adapter of `pages` pages: each row's image is more than half a page.
SentAdapter large(std::size_t pages, std::uint32_t seed = 1) {
  const std::vector<SentRow> rows{
      {kMlpGateUp, 0, 7, true}, {kMlpGateUp, 1, 7, true}, {kMlp4HToH, 0, 8, true}, {kMlp4HToH, 1, 8, true}};
  BOOST_REQUIRE(pages <= 2);
  return make_adapter({rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(pages)}, small_layout(),
                      seed);
}

/// A cache whose invariants are checked at every use.
class CheckedCache {
 public:
  CheckedCache(std::size_t host_bytes, std::int64_t pages)
      : cache_(make_host_cache(small_layout(), {host_bytes, kPageBytes, pages})) {}
  ~CheckedCache() { check(); }
  LoraCache* operator->() {
    check();
    return &cache_;
  }
  std::shared_ptr<const HostAdapter> admit(std::uint64_t task_id, const SentAdapter& sent,
                                           bool replace = false) {
    return (*this)->admit(sent.send(task_id, replace));
  }
  std::shared_ptr<const HostAdapter> admit(std::uint64_t task_id) {
    LoraConfig config;
    config.task_id = task_id;
    return (*this)->admit(config);
  }
  /// Stores one small adapter of this id and leaves it unused.
  void store(std::uint64_t task_id) { (void)admit(task_id, small(static_cast<std::uint32_t>(task_id))); }
  bool on_device(std::uint64_t task_id) {
    for (const LoraCacheEntry& entry : (*this)->list()) {
      if (entry.task_id == task_id) return entry.on_device;
    }
    return false;
  }
  std::vector<std::uint64_t> ids() {
    std::vector<std::uint64_t> result;
    for (const LoraCacheEntry& entry : (*this)->list()) result.push_back(entry.task_id);
    return result;
  }

 private:
  void check() {
    for (const std::string& broken : cache_.check_invariants()) BOOST_ERROR(broken);
  }
  LoraCache cache_;
};

using Ids = std::vector<std::uint64_t>;

template <class Error, class Body>
void expect_error(Body&& body, const std::vector<std::string>& says) {
  std::string text;
  try {
    body();
  } catch (const Error& error) {
    text = error.what();
  }
  for (const std::string& part : says)
    BOOST_TEST(contains(text, part), "'" << text << "' does not say: " << part);
}

BOOST_AUTO_TEST_SUITE(lora_cache)

BOOST_AUTO_TEST_CASE(a_task_that_nobody_sent_is_not_found) {
  CheckedCache cache(1000, 2);
  expect_error<PeftTaskNotCachedError>(
      [&] { (void)cache.admit(5); },
      {"LoRA task 5 not found in cache. Please send LoRA weights with request"});
  expect_error<PeftTaskNotCachedError>([&] { cache->pin(5); }, {"LoRA task 5 not found in cache"});
  expect_error<PeftTaskNotCachedError>([&] { cache->unpin(5); }, {"LoRA task 5 not found in cache"});
  expect_error<PeftTaskNotCachedError>([&] { cache->unload(5); }, {"LoRA task 5 not found in cache"});
  BOOST_TEST(cache->stats().host_misses == 1);
}

BOOST_AUTO_TEST_CASE(later_requests_find_the_adapter_by_its_id) {
  CheckedCache cache(1000, 2);
  const auto first = cache.admit(5, small(1));
  const auto second = cache.admit(5);
  BOOST_TEST(first->generation() == second->generation());
  BOOST_TEST(cache->list().at(0).users == 2);
  BOOST_TEST(cache->stats().host_hits == 1);
  BOOST_TEST(cache->stats().host_misses == 1);
}

BOOST_AUTO_TEST_CASE(the_host_level_evicts_the_least_recently_used_and_no_more_than_needed) {
  CheckedCache cache(3 * kSmallBytes, 8);
  for (const std::uint64_t id : {1, 2, 3}) cache.store(id);
  (void)cache.admit(1);
  cache.store(4);
  BOOST_TEST(cache.ids() == (Ids{1, 3, 4}));
  cache.store(5);
  BOOST_TEST(cache.ids() == (Ids{1, 4, 5}));
  BOOST_TEST(cache->stats().host_evictions == 2);
  BOOST_TEST(cache->stats().host_bytes_used == 3 * kSmallBytes);
}

BOOST_AUTO_TEST_CASE(the_host_level_evicts_outdated_adapters_first) {
  CheckedCache cache(4 * kSmallBytes, 8);
  for (const std::uint64_t id : {1, 2, 3, 4}) cache.store(id);
  cache->set_outdated(3, true);
  {
    const auto held = cache.admit(4);
    cache->set_outdated(4, true);
    cache.store(5);
    BOOST_TEST(cache.ids() == (Ids{1, 2, 4, 5}));  // 3 had no request
  }
  cache->set_outdated(2, true);
  BOOST_TEST(!cache->list().at(0).outdated);
  BOOST_TEST(cache->list().at(1).outdated);
  (void)cache.admit(4);
  (void)cache.admit(2);
  cache.store(6);
  BOOST_TEST(cache.ids() == (Ids{1, 2, 5, 6}));  // 4 was used before 2
  cache->set_outdated(2, false);
  cache.store(7);
  BOOST_TEST(cache.ids() == (Ids{2, 5, 6, 7}));
}

BOOST_AUTO_TEST_CASE(the_device_level_evicts_outdated_adapters_first) {
  CheckedCache cache(1 << 20, 3);
  std::vector<std::shared_ptr<const HostAdapter>> held;
  for (const std::uint64_t id : {1, 2, 3, 4}) {
    held.push_back(cache.admit(id, large(1, static_cast<std::uint32_t>(id))));
    if (id < 4) BOOST_TEST(cache->acquire(held.back()).has_value());
  }
  cache->set_outdated(2, true);
  BOOST_TEST(cache->acquire(held[3]).has_value());
  BOOST_TEST(cache.on_device(1));
  BOOST_TEST(!cache.on_device(2));
  BOOST_TEST(cache->acquire(held[1]).has_value());  // it comes back, and is still outdated
  BOOST_TEST(!cache.on_device(1));
  BOOST_TEST(cache->acquire(held[0]).has_value());
  BOOST_TEST(!cache.on_device(2));
  BOOST_TEST(cache.on_device(3));
}

BOOST_AUTO_TEST_CASE(an_outdated_adapter_stays_while_it_is_pinned) {
  CheckedCache cache(2 * kSmallBytes, 8);
  cache.store(1);
  cache->pin(1);
  cache->set_outdated(1, true);
  cache.store(2);
  cache.store(3);
  BOOST_TEST(cache.ids() == (Ids{1, 3}));
  cache->unpin(1);
  cache.store(4);
  BOOST_TEST(cache.ids() == (Ids{3, 4}));
}

BOOST_AUTO_TEST_CASE(a_new_adapter_is_current) {
  CheckedCache cache(2 * kSmallBytes, 8);
  cache->set_outdated(1, true);  // not cached: no effect
  cache.store(1);
  BOOST_TEST(!cache->list().at(0).outdated);
  cache->set_outdated(1, true);
  (void)cache.admit(1, small(7), true);
  BOOST_TEST(!cache->list().at(0).outdated);
}

BOOST_AUTO_TEST_CASE(an_adapter_counts_as_used_until_its_request_ends) {
  CheckedCache cache(3 * kSmallBytes, 8);
  auto held = cache.admit(1, small(1));
  cache.store(2);
  cache.store(3);
  held.reset();
  cache.store(4);
  BOOST_TEST(cache.ids() == (Ids{1, 3, 4}));
}

BOOST_AUTO_TEST_CASE(a_host_level_full_of_adapters_in_use_refuses_and_changes_nothing) {
  CheckedCache cache(2 * kSmallBytes, 8);
  auto one = cache.admit(1, small(1));
  cache.store(2);
  const SentAdapter wide = make_adapter({{kAttnQ, 0, 4, false}}, small_layout());
  const LoraCacheStats before = cache->stats();
  expect_error<LoraCacheFullError>(
      [&] { (void)cache.admit(3, wide); },
      {"PEFT Cache is full. Could not store taskId=3: needs 256 bytes", "keep 128", "host level's 256"});
  BOOST_TEST((cache->stats() == before));
  BOOST_TEST(cache.ids() == (Ids{1, 2}));
  one.reset();
  (void)cache.admit(3, wide);
  BOOST_TEST(cache.ids() == Ids{3});
}

BOOST_AUTO_TEST_CASE(adapters_that_can_never_fit_are_refused_at_once_with_both_figures) {
  CheckedCache cache(10 * kSmallBytes, 1);
  expect_error<LoraCacheFullError>([&] { (void)cache.admit(3, large(2)); },
                                   {"PEFT Cache is full. Could not store taskId=3: needs", "in all"});
  CheckedCache few_pages(1 << 20, 1);
  expect_error<LoraCacheFullError>(
      [&] { (void)few_pages.admit(3, large(2)); },
      {"taskId=3: needs 16384 bytes (2 pages), but the device level has 8192 bytes (1 pages) in all"});
  BOOST_TEST(few_pages->list().empty());
}

BOOST_AUTO_TEST_CASE(the_device_level_evicts_the_least_recently_used_and_no_more_than_needed) {
  CheckedCache cache(1 << 20, 3);
  for (const std::uint64_t id : {1, 2, 3}) {
    cache.store(id);
    BOOST_TEST(cache->acquire(cache.admit(id)).has_value());
  }
  BOOST_TEST(cache->acquire(cache.admit(1)).has_value());
  cache.store(4);
  const auto lease = cache->acquire(cache.admit(4));
  BOOST_TEST(lease.has_value());
  BOOST_TEST(cache.on_device(1));
  BOOST_TEST(!cache.on_device(2));
  BOOST_TEST(cache.on_device(3));
  BOOST_TEST(cache->obtainable_pages() == 2);
  const auto two_pages = cache.admit(9, large(2));
  BOOST_TEST(cache->pages_needed(*two_pages) == 2);
  BOOST_TEST(cache->acquire(two_pages).has_value());
  BOOST_TEST(!cache.on_device(1));
  BOOST_TEST(!cache.on_device(3));
  const LoraCacheStats stats = cache->stats();
  BOOST_TEST(stats.device_hits == 1);
  BOOST_TEST(stats.device_misses == 5);
  BOOST_TEST(stats.device_evictions == 3);
}

BOOST_AUTO_TEST_CASE(both_levels_have_one_copy_in_host_memory) {
  CheckedCache cache(1 << 20, 3);
  std::vector<const std::byte*> first_places;
  for (const std::uint64_t id : {1, 2, 3, 4, 5}) {
    cache.store(id);
    first_places.push_back(cache->acquire(cache.admit(id))->adapter().sites[0].a);
  }
  LoraCacheStats stats = cache->stats();
  BOOST_TEST(stats.host_bytes_used == 5 * kSmallBytes);
  BOOST_TEST(stats.memory_bytes == 5 * kSmallBytes);
  BOOST_TEST(stats.device_pages_used == 3);  // counted, without memory of their own
  BOOST_TEST(stats.device_evictions == 2);
  BOOST_TEST(cache->acquire(cache.admit(1))->adapter().sites[0].a == first_places[0]);
  stats = cache->stats();
  BOOST_TEST(stats.device_misses == 6);
  BOOST_TEST(stats.device_evictions == 3);
  BOOST_TEST(stats.load_seconds == 0.0);
  BOOST_TEST(stats.memory_bytes == 5 * kSmallBytes);
}

BOOST_AUTO_TEST_CASE(a_device_with_memory_of_its_own_has_a_second_copy) {
  int loads = 0;
  LoraCache cache(small_layout(), std::make_unique<HookedPages>(kPageBytes, 2, [&] { ++loads; }),
                  {.host_bytes = 1 << 20});
  const auto adapter = cache.admit(small(1).send(1));
  BOOST_TEST(adapter->is_packed());
  BOOST_TEST(cache.stats().memory_bytes == kSmallBytes + 2 * kPageBytes);
  const auto lease = cache.acquire(adapter);
  BOOST_TEST(lease->adapter().sites[0].a != adapter->data());
  BOOST_TEST(cache.stats().load_seconds > 0.0);
  BOOST_TEST(loads == 1);
}

/// Pages of an engine whose other processes get each adapter as sent.
class SharedPages final : public AdapterPages {
 public:
  explicit SharedPages(std::vector<std::size_t>* sent_bytes)
      : pages_(kPageBytes, 2), sent_bytes_(sent_bytes) {}
  [[nodiscard]] std::size_t page_bytes() const override { return pages_.page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return pages_.num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return pages_.address(page); }
  void load(std::span<const std::int64_t> pages, const Write& write) override { pages_.load(pages, write); }
  [[nodiscard]] bool shares_adapters() const override { return true; }
  void share(const std::shared_ptr<const HostAdapter>& adapter, std::span<const std::int64_t> /*pages*/,
             std::uint64_t /*load_id*/) override {
    BOOST_TEST(!adapter->is_packed());
    sent_bytes_->push_back(adapter->bytes());
  }

 private:
  HostPages pages_;
  std::vector<std::size_t>* sent_bytes_;
};

BOOST_AUTO_TEST_CASE(adapters_that_other_processes_get_are_kept_as_sent) {
  std::vector<std::size_t> sent_bytes;
  LoraCache cache(small_layout(), std::make_unique<SharedPages>(&sent_bytes), {.host_bytes = 1 << 20});
  const auto lease = cache.acquire(cache.admit(small(1).send(1)));
  BOOST_TEST(unpack_adapter(lease->adapter(), cache.layout()).size() == 1U);
  BOOST_TEST(sent_bytes == std::vector<std::size_t>{28 * 4});
  BOOST_TEST(cache.check_invariants().empty());
}

BOOST_AUTO_TEST_CASE(a_rank_with_parts_of_layers_keeps_adapters_as_sent) {
  LoraLayout layout = small_layout();
  layout.sites[1].num_remote_inputs = 6;
  LoraCache cache(layout, std::make_unique<HostPages>(kPageBytes, 2), {.host_bytes = 1 << 20});
  const auto adapter = cache.admit(small(1).send(1));
  BOOST_TEST(!adapter->is_packed());
  BOOST_TEST(unpack_adapter(cache.acquire(adapter)->adapter(), layout).size() == 1U);
  BOOST_TEST(cache.stats().memory_bytes == 28 * 4 + 2 * kPageBytes);
}

BOOST_AUTO_TEST_CASE(levels_grow_to_hold_a_batch_of_the_largest_adapter) {
  LoraCache cache(small_layout(), std::make_unique<HostPages>(kPageBytes, 7),
                  {.host_bytes = 2 * kSmallBytes,
                   .device_pages = 2,
                   .max_host_bytes = 7 * kPageBytes,
                   .num_adapters = 3});
  const auto sizes = [&] {
    for (const std::string& broken : cache.check_invariants()) BOOST_ERROR(broken);
    const LoraCacheStats stats = cache.stats();
    return std::pair(stats.host_bytes_total, stats.device_pages_total);
  };
  BOOST_TEST((sizes() == std::pair(2 * kSmallBytes, std::int64_t{2})));
  const auto one = cache.admit(small(1).send(1));
  BOOST_TEST((sizes() == std::pair(3 * kSmallBytes, std::int64_t{3})));
  const auto wide = cache.admit(large(2).send(2));
  BOOST_TEST((sizes() == std::pair(3 * wide->bytes(), std::int64_t{6})));
  const auto again = cache.admit(small(3).send(3));  // a smaller one changes nothing
  BOOST_TEST((sizes() == std::pair(3 * wide->bytes(), std::int64_t{6})));
  std::vector<DeviceLease> leases;
  for (const auto& adapter : {one, wide, again}) {
    auto lease = cache.acquire(adapter);
    BOOST_TEST_REQUIRE(lease.has_value());
    leases.push_back(std::move(*lease));
  }
  BOOST_TEST(cache.stats().device_evictions == 0);
  BOOST_TEST(cache.obtainable_pages() == 2);
}

BOOST_AUTO_TEST_CASE(levels_grow_no_further_than_their_maximum) {
  LoraCache cache(small_layout(), std::make_unique<HostPages>(kPageBytes, 3),
                  {.host_bytes = 0, .device_pages = 1, .max_host_bytes = 2 * kSmallBytes, .num_adapters = 9});
  for (const std::uint64_t id : {1, 2, 3}) (void)cache.admit(small(static_cast<std::uint32_t>(id)).send(id));
  const LoraCacheStats stats = cache.stats();
  BOOST_TEST(stats.host_bytes_total == 2 * kSmallBytes);
  BOOST_TEST(stats.device_pages_total == 3);
  BOOST_TEST(stats.host_evictions == 1);
  expect_error<LoraCacheFullError>([&] { (void)cache.admit(large(1).send(4)); },
                                   {"the host level has 256 in all"});
  BOOST_TEST(cache.check_invariants().empty());
}

BOOST_AUTO_TEST_CASE(leased_pages_are_never_taken) {
  CheckedCache cache(1 << 20, 2);
  const auto one = cache.admit(1, small(1));
  const auto two = cache.admit(2, small(2));
  const auto wide = cache.admit(3, large(2));
  auto lease = cache->acquire(one);
  BOOST_TEST(cache->acquire(two).has_value());
  BOOST_TEST(cache->is_leased(*one));
  BOOST_TEST(!cache->is_leased(*two));
  BOOST_TEST(cache->obtainable_pages() == 1);
  const LoraCacheStats before = cache->stats();
  BOOST_TEST(!cache->acquire(wide).has_value());
  BOOST_TEST((cache->stats() == before));
  BOOST_TEST(cache.on_device(2));
  const DeviceAdapter* device = &lease->adapter();
  auto again = cache->acquire(one);
  BOOST_TEST(device == &again->adapter());
  lease.reset();
  BOOST_TEST(!cache->acquire(wide).has_value());
  again.reset();
  BOOST_TEST(cache->acquire(wide).has_value());
}

BOOST_AUTO_TEST_CASE(an_adapter_that_leaves_the_host_takes_its_device_copy_along) {
  CheckedCache cache(2 * kSmallBytes, 8);
  cache.store(1);
  (void)cache->acquire(cache.admit(1));
  BOOST_TEST(cache->stats().device_pages_used == 1);
  cache.store(2);
  cache.store(3);
  BOOST_TEST(cache->stats().device_pages_used == 0);
  BOOST_TEST(cache->stats().device_evictions == 1);
}

BOOST_AUTO_TEST_CASE(the_same_weights_again_are_a_hit_and_others_are_refused) {
  CheckedCache cache(1 << 20, 8);
  const auto first = cache.admit(1, small(1));
  BOOST_TEST(cache.admit(1, small(1))->generation() == first->generation());
  const LoraCacheStats before = cache->stats();
  expect_error<AdapterError>([&] { (void)cache.admit(1, small(2)); },
                             {"LoRA task 1: is cached with other weights", "replace=True"});
  BOOST_TEST((cache->stats() == before));
  BOOST_TEST(cache.admit(1, small(1), true)->generation() == first->generation());
}

BOOST_AUTO_TEST_CASE(a_replaced_generation_lives_as_long_as_its_requests) {
  CheckedCache cache(2 * kSmallBytes, 2);
  auto old = cache.admit(1, small(1));
  auto lease = cache->acquire(old);
  const std::vector<UnpackedModule> before = unpack_adapter(lease->adapter(), cache->layout());
  auto fresh = cache.admit(1, small(2), true);
  BOOST_TEST(fresh->generation() != old->generation());
  BOOST_TEST(cache.admit(1)->generation() == fresh->generation());
  BOOST_TEST(cache->stats().host_adapters == 2);
  auto fresh_lease = cache->acquire(fresh);
  BOOST_TEST(unpack_adapter(lease->adapter(), cache->layout())[0].a == before[0].a);
  BOOST_TEST(unpack_adapter(fresh_lease->adapter(), cache->layout())[0].a != before[0].a);
  expect_error<LoraCacheFullError>([&] { cache.store(2); }, {"taskId=2"});
  lease.reset();
  // A paused request resumes with the generation that it started with.
  BOOST_TEST(cache->obtainable_pages() == 1);
  lease = cache->acquire(old);
  BOOST_TEST(cache->stats().device_misses == 2);
  BOOST_TEST(unpack_adapter(lease->adapter(), cache->layout())[0].a == before[0].a);
  old.reset();
  BOOST_TEST(cache->stats().host_adapters == 2);
  lease.reset();
  BOOST_TEST(cache->stats().host_adapters == 1);
  BOOST_TEST(cache->stats().host_bytes_used == kSmallBytes);
  BOOST_TEST(cache->stats().device_pages_used == 1);
}

BOOST_AUTO_TEST_CASE(replacing_reuses_the_room_of_what_it_replaces) {
  CheckedCache cache(2 * kSmallBytes, 2);
  cache.store(1);
  cache.store(2);
  (void)cache.admit(1, small(7), true);
  BOOST_TEST(cache.ids() == (Ids{1, 2}));
  BOOST_TEST(cache->stats().host_evictions == 0);
}

BOOST_AUTO_TEST_CASE(an_unloaded_adapter_is_forgotten_and_kept_for_those_that_hold_it) {
  CheckedCache cache(1 << 20, 2);
  auto held = cache.admit(1, small(1));
  auto lease = cache->acquire(held);
  cache->unload(1);
  BOOST_TEST(!cache->contains(1));
  BOOST_TEST(cache->list().empty());
  expect_error<PeftTaskNotCachedError>([&] { (void)cache.admit(1); }, {"LoRA task 1"});
  BOOST_TEST(unpack_adapter(lease->adapter(), cache->layout()).size() == 1U);
  cache.store(1);
  BOOST_TEST(cache->stats().host_adapters == 2);
  held.reset();
  lease.reset();
  BOOST_TEST(cache->stats().host_adapters == 1);
  BOOST_TEST(cache->stats().device_pages_used == 0);
  cache->unload(1);
  BOOST_TEST(cache->stats().host_adapters == 0);
  BOOST_TEST(cache->stats().host_bytes_used == 0U);
}

BOOST_AUTO_TEST_CASE(pinned_adapters_stay_on_both_levels) {
  CheckedCache cache(2 * kSmallBytes, 2);
  cache.store(1);
  cache->pin(1);
  BOOST_TEST(cache.on_device(1));
  for (const std::uint64_t id : {2, 3, 4}) {
    cache.store(id);
    BOOST_TEST(cache->acquire(cache.admit(id)).has_value());
  }
  BOOST_TEST(cache.ids() == (Ids{1, 4}));
  BOOST_TEST(cache.on_device(1));
  BOOST_TEST(cache->obtainable_pages() == 1);
  BOOST_TEST(cache->is_leased(*cache.admit(1)));
  cache->pin(1);
  cache->unpin(1);
  cache.store(5);
  cache.store(6);
  BOOST_TEST(cache.ids() == (Ids{5, 6}));
}

BOOST_AUTO_TEST_CASE(a_pin_that_finds_no_room_or_starves_a_request_is_refused) {
  CheckedCache cache(1 << 20, 2);
  auto wide = cache.admit(1, large(2));
  cache.store(2);
  expect_error<LoraCacheFullError>([&] { cache->pin(2); },
                                   {"taskId=2", "task 1, which a request holds, needs 2"});
  wide.reset();
  cache->pin(2);
  expect_error<LoraCacheFullError>([&] { (void)cache.admit(1); },
                                   {"taskId=1: needs 2 device pages, but pinned adapters keep 1 of 2"});
  cache.store(3);
  const auto lease = cache->acquire(cache.admit(3));
  cache.store(4);
  const LoraCacheStats before = cache->stats();
  expect_error<LoraCacheFullError>([&] { cache->pin(4); }, {"taskId=4"});
  BOOST_TEST((cache->stats() == before));
}

BOOST_AUTO_TEST_CASE(a_new_generation_inherits_the_pin) {
  CheckedCache cache(2 * kSmallBytes, 2);
  cache.store(1);
  cache->pin(1);
  (void)cache.admit(1, small(9), true);
  BOOST_TEST(cache->list().at(0).pinned);
  BOOST_TEST(!cache.on_device(1));
  BOOST_TEST(cache->acquire(cache.admit(1)).has_value());
  BOOST_TEST(cache.on_device(1));
  BOOST_TEST(cache->obtainable_pages() == 1);
  cache->unload(1);
  BOOST_TEST(cache->obtainable_pages() == 2);
}

BOOST_AUTO_TEST_CASE(an_adapter_is_withdrawn_only_by_those_that_alone_were_given_it) {
  CheckedCache cache(1 << 20, 4);
  auto adapter = cache.admit(1, small(1));
  const std::uint64_t generation = adapter->generation();
  (void)cache.admit(1);
  cache->withdraw(generation, 1);  // another call found it
  BOOST_TEST(cache.ids() == (Ids{1}));
  cache->withdraw(generation, 2);
  BOOST_TEST(cache.ids().empty());
  BOOST_TEST(cache->stats().host_adapters == 1);  // it is held
  adapter.reset();
  BOOST_TEST(cache->stats().host_adapters == 0);
  cache->withdraw(generation, 2);  // it is already gone
  adapter = cache.admit(1, small(2));
  cache->pin(1);
  cache->withdraw(adapter->generation(), 1);
  BOOST_TEST(cache.ids() == (Ids{1}));
  cache->unpin(1);
  const auto replacement = cache.admit(1, small(3), true);
  cache->withdraw(adapter->generation(), 1);  // another adapter has its id
  cache->withdraw(replacement->generation(), 1);
  BOOST_TEST(cache.ids() == (Ids{1}));
}

BOOST_AUTO_TEST_CASE(adapters_held_by_requests_outlive_the_cache) {
  std::optional<DeviceLease> lease;
  std::shared_ptr<const HostAdapter> held;
  {
    LoraCache cache = make_host_cache(small_layout(), {1 << 20, kPageBytes, 2});
    held = cache.admit(small(1).send(1));
    lease = cache.acquire(held);
  }
  BOOST_TEST(held->task_id() == 1U);
  BOOST_TEST(unpack_adapter(lease->adapter(), small_layout()).size() == 1U);
}

BOOST_AUTO_TEST_CASE(adapters_of_other_caches_are_refused) {
  CheckedCache cache(1 << 20, 2);
  CheckedCache other(1 << 20, 2);
  const auto adapter = other.admit(1, small(1));
  expect_error<AdapterError>([&] { (void)cache->acquire(adapter); },
                             {"LoRA task 1", "not admitted by this LoRA cache"});
}

BOOST_AUTO_TEST_CASE(pages_too_small_for_an_image_are_refused) {
  expect_error<ConfigError>([] { (void)make_host_cache(small_layout(), {1 << 20, 4000, 2}); },
                            {"page_bytes is 4000", "needs 6272", "multiples of 64"});
}

BOOST_AUTO_TEST_CASE(more_pages_than_memory_are_refused) {
  expect_error<ConfigError>([] { HostPages(kPageBytes, std::int64_t{1} << 50); }, {"the system refuses"});
  expect_error<ConfigError>([] { HostPages(kPageBytes, std::int64_t{1} << 62); },
                            {"larger than the address space"});
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::lora_cache_test
