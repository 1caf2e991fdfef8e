#include <atomic>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>
#include <thread>

#include "adapters.h"
#include "adaptrt/core/error.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/pack_adapter.h"
#include "hooked_pages.h"
#include "pinned_pages.h"

namespace adaptrt::lora_cache_threads_test {
namespace {

using namespace testing;
using enum LoraModule;

constexpr int kThreads = 4;
constexpr int kTasks = 6;
constexpr int kRounds = 200;

SentAdapter adapter_of(int task) {
  return make_adapter({{kAttnQ, 0, 1 + task, false}, {kMlpGateUp, 1, 2, true}}, small_layout(),
                      static_cast<std::uint32_t>(task));
}

BOOST_AUTO_TEST_SUITE(lora_cache_threads)

// Each level has room for half of the tasks. So threads evict adapters that others need, wait for loads of
// others or of workers, sometimes in vain, and are refused. Each adapter that they get must be the one that
// was sent.
BOOST_DATA_TEST_CASE(threads_get_what_was_sent_while_others_evict_it,
                     boost::unit_test::data::make({0, 2}) * boost::unit_test::data::make({false, true}),
                     num_workers, is_pinned) {
  const LoraLayout layout = small_layout();
  std::atomic<int> loads{0};
  const auto in_load = [&] {
    if (++loads % 50 == 0) throw StepError("a load fails now and then");
  };
  PinnedPages::Log log;
  log.in_wait = in_load;
  std::unique_ptr<AdapterPages> pages;
  if (is_pinned) {
    pages = std::make_unique<PinnedPages>(8192, 3, log);
  } else {
    pages = std::make_unique<HookedPages>(8192, 3, in_load);
  }
  LoraCache cache(layout, std::move(pages), {.host_bytes = 6000, .num_load_workers = num_workers});
  std::vector<SentAdapter> sent;
  for (int task = 0; task < kTasks; ++task) sent.push_back(adapter_of(task));
  std::atomic<int> wrong{0};
  std::atomic<int> leases{0};
  std::atomic<std::size_t> failures{0};
  const auto work = [&](int thread) {
    std::mt19937 random(static_cast<std::uint32_t>(thread));
    for (int round = 0; round < kRounds; ++round) {
      const int task = static_cast<int>(random() % kTasks);
      const auto id = static_cast<std::uint64_t>(task);
      try {
        const auto held = cache.admit(sent[static_cast<std::size_t>(task)].send(id));
        for (int tries = 0; tries < 1000; ++tries) {
          if (cache.ensure(*held, static_cast<std::uint64_t>(1 + round)) == AdapterReadiness::kReady) break;
          std::this_thread::yield();
        }
        if (auto lease = cache.acquire(held)) {
          ++leases;
          // A step waits in the same way, and fails if the copies have failed.
          if (is_pinned && !PinnedPages::await(log, lease->adapter().load_id)) continue;
          const auto modules = unpack_adapter(lease->adapter(), layout);
          const SentAdapter& expected = sent[static_cast<std::size_t>(task)];
          for (std::size_t i = 0; i < modules[0].a.size(); ++i) {
            if (modules[0].a[i] != expected.get(0, i)) ++wrong;
          }
        }
        switch (random() % 8) {
          case 0:
            cache.pin(id);
            break;
          case 1:
            cache.unload(id);
            break;
          case 2:
            (void)cache.obtainable_pages();
            (void)cache.list();
            break;
          case 3:
            failures += cache.take_load_failures().size();
            break;
          case 4:
            cache.set_outdated(id, random() % 2 == 0);
            break;
          default:
            break;
        }
        if (cache.contains(id)) cache.unpin(id);
      } catch (const LoraCacheFullError&) {
      } catch (const PeftTaskNotCachedError&) {
      } catch (const StepError&) {  // of a load or a pin
      }
      if (!cache.check_invariants().empty()) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  BOOST_TEST(wrong == 0);
  BOOST_TEST(leases > 0);
  BOOST_TEST(cache.stats().device_evictions > 0);
  BOOST_TEST(cache.stats().failed_loads > 0);
  failures += cache.take_load_failures().size();
  BOOST_TEST((num_workers == 0 || failures > 0U));
}

// Every call of pin() ends: the adapter was loaded, its load failed, or another thread removed it.
BOOST_DATA_TEST_CASE(threads_pin_one_adapter_while_others_replace_and_unload_it,
                     boost::unit_test::data::make({0, 2}), num_workers) {
  std::atomic<int> loads{0};
  const auto in_load = [&] {
    if (++loads % 3 == 0) throw StepError("every third load fails");
  };
  LoraCache cache(small_layout(), std::make_unique<HookedPages>(8192, 3, in_load),
                  {.host_bytes = 1 << 20, .num_load_workers = num_workers});
  std::atomic<int> pinned{0};
  std::atomic<int> failed{0};
  std::atomic<int> wrong{0};
  const auto work = [&](int thread) {
    std::mt19937 random(static_cast<std::uint32_t>(thread));
    for (int round = 0; round < kRounds; ++round) {
      try {
        switch (random() % 6) {
          case 0:
            (void)cache.admit(adapter_of(static_cast<int>(random() % kTasks)).send(1, true));
            break;
          case 1:
            cache.unpin(1);
            break;
          case 2:
            if (random() % 4 == 0) cache.unload(1);
            break;
          default:
            cache.pin(1);
            ++pinned;
        }
      } catch (const LoraCacheFullError&) {
      } catch (const PeftTaskNotCachedError&) {
        (void)cache.admit(adapter_of(0).send(1, true));
      } catch (const StepError&) {
        ++failed;
      }
      if (!cache.check_invariants().empty()) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  BOOST_TEST(wrong == 0);
  BOOST_TEST(pinned > 0);
  BOOST_TEST(failed > 0);
}

BOOST_AUTO_TEST_CASE(threads_that_want_one_adapter_pack_it_once) {
  LoraCache cache = make_host_cache(small_layout(), {1 << 20, 8192, 4});
  const SentAdapter sent = adapter_of(3);
  std::vector<std::optional<DeviceLease>> leases(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { leases[i] = cache.acquire(cache.admit(sent.send(1))); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& lease : leases)
    BOOST_TEST((lease.has_value() && &lease->adapter() == &leases[0]->adapter()));
  BOOST_TEST(cache.stats().device_misses == 1);
  BOOST_TEST(cache.stats().device_hits == kThreads - 1);
  BOOST_TEST(cache.stats().host_misses == 1);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::lora_cache_threads_test
