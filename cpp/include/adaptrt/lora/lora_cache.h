#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/adapter_pages.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Sizes in bytes and pages, already resolved from PeftCacheConfig (see resolve_cache_sizes).
struct LoraCacheSizes {
  /// Sizes at the start.
  std::size_t host_bytes = 0;
  std::size_t page_bytes = 0;
  std::int64_t device_pages = 0;
  /// Sizes up to which the levels grow; a level does not grow if its maximum is not above its size.
  std::size_t max_host_bytes = 0;
  std::int64_t max_device_pages = 0;

  /// Number of pages to allocate or reserve.
  [[nodiscard]] std::int64_t pages_to_make() const { return std::max(device_pages, max_device_pages); }
};

struct LoraCacheOptions {
  std::size_t host_bytes = 0;
  /// Number of the pages that are in use at the start; 0: all. The level grows up to all pages.
  std::int64_t device_pages = 0;
  /// Size up to which the host level grows; it does not grow if this is not above host_bytes.
  std::size_t max_host_bytes = 0;
  /// Levels that may grow do so when adapters arrive, to hold this many adapters of the size of the largest.
  std::int32_t num_adapters = 0;
  /// How the device level stores matrices; check_lora_storage() finds no problem with it.
  LoraStorage storage = LoraStorage::kExact;
  /// Number of additional threads that load adapters; 0: the thread that acquires an adapter loads it.
  std::int32_t num_load_workers = 0;
  /// Number of threads, the calling one included, that check and pack an adapter in admit(), if the device
  /// level has copies of the host level's packed adapters.
  std::int32_t num_admit_threads = 1;
  /// Called without a lock when a load that acquire() did not make itself has ended, successfully or not, and
  /// when its adapter can be leased before that. It must not throw.
  std::function<void()> on_load_end = {};
};

/// Counters and current contents of the two levels.
struct LoraCacheStats {
  std::int64_t host_hits = 0;         ///< admit() found the task in the host level
  std::int64_t host_misses = 0;       ///< admit() stored the task's weights, or did not find its id
  std::int64_t host_evictions = 0;    ///< adapters that left the host level to make room
  std::int64_t device_hits = 0;       ///< leases of adapters that were already in the device level
  std::int64_t device_misses = 0;     ///< adapters that had to be loaded to the device level
  std::int64_t device_evictions = 0;  ///< device copies evicted to make room in either level
  std::int64_t host_adapters = 0;     ///< generations in host memory, including those that only requests hold
  std::int64_t device_adapters = 0;
  std::size_t host_bytes_used = 0;
  std::size_t host_bytes_total = 0;
  std::size_t page_bytes = 0;
  std::int64_t device_pages_used = 0;
  std::int64_t device_pages_total = 0;
  std::int64_t loads_in_flight = 0;  ///< adapters that wait for a load worker or are being loaded now
  std::int64_t failed_loads = 0;
  double load_seconds = 0.0;  ///< total time spent copying adapters to the device level
  std::int64_t steps_waiting_for_adapters =
      0;  ///< steps with room in the batch for requests whose adapters got no room on the device level
  std::size_t memory_bytes = 0;     ///< adapters of the host level, and the device level if it has own memory
  std::size_t saved_bytes = 0;      ///< bytes that the host level would need in addition without sharing and
                                    ///< without compression
  std::int64_t saved_products = 0;  ///< HostAdapter::saved_products(), of all adapters of the host level
  std::size_t pinned_bytes = 0;     ///< pinned memory for the host level's adapters, in use or not
  std::int64_t staged_loads = 0;    ///< loads of packed adapters that are not in pinned memory

  friend bool operator==(const LoraCacheStats&, const LoraCacheStats&) = default;
};

/// One row of LoraCache::list().
struct LoraCacheEntry {
  std::uint64_t task_id = 0;
  std::size_t host_bytes = 0;
  std::int64_t device_pages = 0;  ///< pages that it needs on the device
  bool on_device = false;
  bool pinned = false;
  std::int64_t users = 0;  ///< requests that hold it
  bool outdated = false;   ///< evicted before all adapters that are not; see set_outdated()

  friend bool operator==(const LoraCacheEntry&, const LoraCacheEntry&) = default;
};

/// Availability of an adapter on the device level.
enum class AdapterReadiness : std::uint8_t {
  kReady,         ///< acquire() gives a lease now
  kLoading,       ///< loading; on_load_end is called when it can be leased, or when the load fails
  kAwaitsLoads,   ///< running loads take pages that it needs
  kAwaitsOthers,  ///< pages that it needs are reserved for adapters that were ensured before it in this turn
  kNoRoom,        ///< pages that it needs are leased or pinned
};

/// A failed load that ensure() or pin() asked for.
struct LoadFailure {
  std::uint64_t generation = 0;  ///< HostAdapter::generation()
  std::string reason;
};

/// Lists why the device level of an engine cannot store adapters in this way.
[[nodiscard]] Problems check_lora_storage(LoraStorage storage, const LoraLayout& layout);

class DeviceLease;

/// The two-level LoRA cache. The host level has checked adapters, packed in the kernels' layout; if other
/// processes get them too, it has them as sent. The device level has them in the kernels' layout, in pages.
/// If it is host memory, it refers to the host level's packed adapters and only counts pages: a load takes no
/// time and no memory, and cannot fail. Both levels evict the least recently used adapters, only as many as
/// needed, and never one that is pinned or held by a request; outdated adapters go first. An adapter counts
/// as used until its last request or lease ends.
///
/// An adapter evicted from the host level loses its device copy too, because no request could find it there.
/// The bytes of a replaced or unloaded generation count until its last request ends, so host memory never
/// exceeds host_bytes. If the device level refers to the host level, matrices that are equal are kept and
/// counted once, until the last adapter with them has gone.
///
/// For a device with memory of its own, the host level keeps packed adapters in pinned memory, from which the
/// device copies them. It pins as much as the level's size and the adapter that is being admitted. If the
/// system pins less, or no range is large enough, an adapter is kept in other memory and copied through
/// staging memory (LoraCacheStats::staged_loads).
///
/// With load workers, an adapter in pinned memory can be leased as soon as its copies are enqueued: the
/// engine's steps wait for them (AdapterPages::begin_copies). The load ends, and its worker is free, when
/// they are done. If they fail, the steps that read the adapter fail too.
///
/// Levels that were not given a size grow when larger adapters arrive (LoraCacheOptions::num_adapters).
///
/// A load reserves its pages at the start, and keeps them and the adapter until it ends. After it, the copy
/// is idle unless a lease was taken meanwhile. It is dropped if the adapter was unloaded or replaced
/// meanwhile and no request holds it. A failed load releases its pages.
///
/// Thread-safe; a DeviceAdapter is read without a lock while its lease exists. Adapters are checked, copied
/// and loaded outside the lock. The destructor waits for running loads and drops those that wait for a
/// worker.
class LoraCache {
 public:
  /// `pages` is the device level, written in the layout's matrix_layout. Throws EngineError if the layout's
  /// sites and target modules disagree, ConfigError if a page is smaller than the largest image that the
  /// layout allows.
  LoraCache(LoraLayout layout, std::unique_ptr<AdapterPages> pages, LoraCacheOptions options);
  ~LoraCache();
  LoraCache(const LoraCache&) = delete;
  LoraCache& operator=(const LoraCache&) = delete;

  /// Admits a request's LoraConfig: stores its tensors if it has some, otherwise looks the task up. The
  /// result keeps this generation of the adapter in the host level until it is dropped; each call counts as
  /// one user. Equal weights are a hit. Different weights with `replace` make a new generation, which
  /// inherits the pin; requests with the old one keep it. Throws AdapterError (for a broken rule, or for
  /// different weights under a cached task_id without `replace`), PeftTaskNotCachedError, or
  /// LoraCacheFullError (with the needed and available bytes; also if the adapter could never fit in the
  /// device level together with the pinned ones). If it throws, only counters and the sizes of levels that
  /// grow have changed.
  [[nodiscard]] std::shared_ptr<const HostAdapter> admit(const LoraConfig& config);

  /// Returns the terms of the adapter that admit() would return; nullopt if admit() would throw because it is
  /// unknown. Changes nothing.
  [[nodiscard]] std::optional<AdapterTerms> terms_of(const LoraConfig& config) const;

  /// Keeps the adapter in the device level while the lease exists; nullopt if it is not there. With load
  /// workers it never waits. Without workers it loads the adapter: it rethrows the load's error, and returns
  /// nullopt if the pages to evict are all leased or pinned. Throws AdapterError for an adapter of another
  /// cache.
  [[nodiscard]] std::optional<DeviceLease> acquire(const std::shared_ptr<const HostAdapter>& adapter);

  /// Asks for an adapter that will be acquired soon. With load workers, one of them loads it if there is room
  /// and `may_load` is true. To make room it evicts only idle adapters that were not ensured in the same
  /// turn. `turn` is not 0; calls of one turn must come in the order in which the adapters are needed.
  /// Without workers nothing is loaded. Throws AdapterError like acquire().
  [[nodiscard]] AdapterReadiness ensure(const HostAdapter& adapter, std::uint64_t turn, bool may_load = true);
  /// Asks for an adapter that a request outside all turns so far will need: like ensure() in the newest turn.
  void expect(const HostAdapter& adapter);
  /// Returns the failed loads of load workers; each is returned once.
  [[nodiscard]] std::vector<LoadFailure> take_load_failures();
  [[nodiscard]] bool has_load_workers() const { return !workers_.empty(); }

  /// Number of pages available to adapters that are neither leased nor pinned: free pages and those that can
  /// be evicted. It includes an idle copy's own pages, so an adapter always costs pages_needed(), resident or
  /// not.
  [[nodiscard]] std::int64_t obtainable_pages() const;
  /// Number of device pages of an adapter that admit() returned.
  [[nodiscard]] std::int64_t pages_needed(const HostAdapter& adapter) const;
  /// True if a lease would take nothing from obtainable_pages(): a running request leases the adapter, or it
  /// is pinned and on the device.
  [[nodiscard]] bool is_leased(const HostAdapter& adapter) const;

  /// Loads an adapter to the device and keeps it in both levels, used or not. Returns after the load, or when
  /// another thread has unpinned or unloaded it meanwhile. Throws PeftTaskNotCachedError, or
  /// LoraCacheFullError if there is no room now or if an adapter held by a request could then never fit;
  /// nothing changes then. Every call that waits for a load rethrows its error; the adapter is not pinned
  /// then.
  void pin(std::uint64_t task_id);
  /// Unpins an adapter, which counts as just used. Throws PeftTaskNotCachedError.
  void unpin(std::uint64_t task_id);
  /// Removes an adapter, pinned or not. New requests do not find it. If requests hold it, it is deleted when
  /// the last of them ends, and its device copy with the last lease. Throws PeftTaskNotCachedError.
  void unload(std::uint64_t task_id);
  /// Marks an adapter as outdated, or as current again. Both levels evict outdated adapters before current
  /// ones, the least recently used first. A new adapter is current, also one that replaces an outdated one.
  /// An adapter that becomes current again counts as just used. Does nothing if the task is not cached.
  void set_outdated(std::uint64_t task_id, bool outdated) noexcept;
  /// Undoes `admissions` calls of admit() that returned this generation: removes it, like unload(), if one of
  /// them stored it. Does nothing if another call returned it too, if it is pinned, or if it replaced another
  /// generation.
  void withdraw(std::uint64_t generation, std::int64_t admissions) noexcept;
  [[nodiscard]] bool contains(std::uint64_t task_id) const;
  /// Returns the adapters that admit() finds by id, in ascending order.
  [[nodiscard]] std::vector<LoraCacheEntry> list() const;
  [[nodiscard]] LoraCacheStats stats() const;
  /// Counts a step in LoraCacheStats::steps_waiting_for_adapters.
  void count_waiting_step();
  [[nodiscard]] const LoraLayout& layout() const;

  /// Lists every violated invariant of lists, counters and pages; empty if none. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  friend class DeviceLease;
  class Impl;
  std::shared_ptr<Impl> impl_;
  std::vector<std::jthread> workers_;
};

/// Keeps an adapter on the device and in memory, even after the cache is destroyed. Movable; the destructor
/// releases it.
class DeviceLease {
 public:
  DeviceLease(DeviceLease&&) noexcept;
  DeviceLease& operator=(DeviceLease&&) noexcept;
  ~DeviceLease();
  [[nodiscard]] const DeviceAdapter& adapter() const;

 private:
  friend class LoraCache;
  class Impl;
  explicit DeviceLease(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace adaptrt
