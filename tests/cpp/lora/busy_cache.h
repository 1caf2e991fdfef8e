#pragma once

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "adapters.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/pack_adapter.h"
#include "hooked_pages.h"

namespace adaptrt::testing {

inline constexpr std::size_t kPageBytes = 8192;  // the largest image of small_layout() has 5632 bytes

/// A cache with workers whose loads wait at a door. Its invariants are checked at every use.
class BusyCache {
 public:
  using Hook = HookedPages::Hook;
  explicit BusyCache(
      std::int64_t pages, std::int32_t num_workers = 1, Hook in_load = [] {})
      : cache_(
            small_layout(),
            std::make_unique<HookedPages>(kPageBytes, pages,
                                          [this, in_load = std::move(in_load)] {
                                            door.pass();
                                            in_load();
                                          }),
            {.host_bytes = 1 << 20, .num_load_workers = num_workers, .on_load_end = [this] { ends.add(); }}) {
  }
  ~BusyCache() {
    check();
    door.open();
  }
  LoraCache* operator->() {
    check();
    return &cache_;
  }

  std::shared_ptr<const HostAdapter> admit(std::uint64_t task_id, std::uint32_t seed, bool replace = false) {
    return (*this)->admit(
        make_adapter({{LoraModule::kAttnQ, 0, 2, false}}, small_layout(), seed).send(task_id, replace));
  }
  std::shared_ptr<const HostAdapter> admit(std::uint64_t task_id) {
    return admit(task_id, static_cast<std::uint32_t>(task_id));
  }
  /// Admits an adapter of two pages.
  std::shared_ptr<const HostAdapter> admit_large(std::uint64_t task_id) {
    return (*this)->admit(
        make_adapter({{LoraModule::kMlpGateUp, 0, 7, true}, {LoraModule::kMlpGateUp, 1, 7, true}},
                     small_layout())
            .send(task_id));
  }
  AdapterReadiness ensure(const std::shared_ptr<const HostAdapter>& adapter, std::uint64_t turn = 1,
                          bool may_load = true) {
    return (*this)->ensure(*adapter, turn, may_load);
  }
  /// Loads the adapter with the door open.
  void load(const std::shared_ptr<const HostAdapter>& adapter) {
    const int before = ends.count();
    BOOST_TEST_REQUIRE((ensure(adapter) == AdapterReadiness::kLoading));
    ends.await(before + 1);
    BOOST_TEST_REQUIRE((ensure(adapter) == AdapterReadiness::kReady));
  }

 private:
  void check() {
    for (const std::string& broken : cache_.check_invariants()) BOOST_ERROR(broken);
  }

 public:
  Door door;
  Counter ends;

 private:
  LoraCache cache_;
};

/// Checks that the lease has the weights sent with this seed.
inline void check_weights(const std::optional<DeviceLease>& lease, std::uint32_t seed) {
  BOOST_TEST_REQUIRE(lease.has_value());
  const SentAdapter sent = make_adapter({{LoraModule::kAttnQ, 0, 2, false}}, small_layout(), seed);
  const auto modules = unpack_adapter(lease->adapter(), small_layout());
  BOOST_TEST_REQUIRE(modules.size() == 1U);
  for (std::size_t i = 0; i < modules[0].a.size(); ++i) BOOST_TEST(modules[0].a[i] == sent.get(0, i));
}

}  // namespace adaptrt::testing
