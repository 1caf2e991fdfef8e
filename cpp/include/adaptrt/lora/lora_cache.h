#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/lora/adapter_pages.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Sizes in bytes and pages, already resolved from PeftCacheConfig (see resolve_cache_sizes).
struct LoraCacheSizes {
  std::size_t host_bytes = 0;
  std::size_t page_bytes = 0;
  std::int64_t device_pages = 0;
};

struct LoraCacheOptions {
  std::size_t host_bytes = 0;
  /// Number of additional threads that load adapters; 0: the thread that acquires an adapter loads it.
  std::int32_t num_load_workers = 0;
  /// Called without a lock when a load that acquire() did not make itself has ended, well or not. Must not
  /// throw.
  std::function<void()> on_load_end = {};
};

/// Counters and current contents of the two levels.
struct LoraCacheStats {
  std::int64_t host_hits = 0;         ///< admit() found the task on the host level
  std::int64_t host_misses = 0;       ///< admit() stored the task's weights, or found nothing under its id
  std::int64_t host_evictions = 0;    ///< adapters that left the host level to make room
  std::int64_t device_hits = 0;       ///< leases of adapters that were on the device level already
  std::int64_t device_misses = 0;     ///< adapters that had to be loaded to the device level
  std::int64_t device_evictions = 0;  ///< device copies that went to make room on either level
  std::int64_t host_adapters =
      0;  ///< generations in host memory, those that only requests still hold included
  std::int64_t device_adapters = 0;
  std::size_t host_bytes_used = 0;
  std::size_t host_bytes_total = 0;
  std::size_t page_bytes = 0;
  std::int64_t device_pages_used = 0;
  std::int64_t device_pages_total = 0;
  std::int64_t loads_in_flight = 0;  ///< adapters that wait for a load worker or are being loaded now
  std::int64_t failed_loads = 0;
  double load_seconds = 0.0;  ///< total time spent loading adapters to the device level

  friend bool operator==(const LoraCacheStats&, const LoraCacheStats&) = default;
};

/// One row of LoraCache::list().
struct LoraCacheEntry {
  std::uint64_t task_id = 0;
  std::size_t host_bytes = 0;
  std::int64_t device_pages = 0;  ///< needed when on the device
  bool on_device = false;
  bool pinned = false;
  std::int64_t users = 0;  ///< requests that hold it

  friend bool operator==(const LoraCacheEntry&, const LoraCacheEntry&) = default;
};

/// Availability of an adapter on the device level.
enum class AdapterReadiness : std::uint8_t {
  kReady,         ///< acquire() gives a lease now
  kLoading,       ///< on its way; on_load_end is called when it has come, or when it failed
  kAwaitsLoads,   ///< loads that are under way take pages that it needs
  kAwaitsOthers,  ///< the pages that it needs are kept for adapters that were ensured before it in this turn
  kNoRoom,        ///< the pages that it needs are leased or pinned
};

/// A load that was asked for with ensure() or pin() and failed.
struct LoadFailure {
  std::uint64_t generation = 0;  ///< HostAdapter::generation()
  std::string reason;
};

class DeviceLease;

/// The two-level LoRA cache. Host: adapters as submitted, checked. Device: the kernels' layout, in pages.
/// Least recently used goes first on both levels, only as many as are needed, never one that a request holds
/// or that is pinned. An adapter counts as used until the last request that holds it, or the last lease,
/// ends.
///
/// An adapter that leaves the host level takes its device copy along: nothing could find it there any more.
/// The bytes of a generation that was replaced or unloaded count until the last request that holds it ends,
/// so host memory stays within host_bytes whatever requests hold.
///
/// A load reserves its pages at once and keeps them, and the adapter, until it has ended. Then the copy is
/// there like any other, idle when no lease was taken meanwhile. Nothing is left of an adapter that was
/// unloaded or replaced meanwhile and that no request holds. A load that fails gives its pages back.
///
/// Thread-safe; a DeviceAdapter is read without a lock while its lease lives. Checking, copying and loading
/// happen outside the lock. The destructor waits for the loads that are being made; those that wait for a
/// worker are dropped.
class LoraCache {
 public:
  /// `pages` are the device level, written in the layout's matrix_layout. Throws EngineError when the
  /// layout's sites and target modules disagree, ConfigError when a page is smaller than an image that the
  /// layout allows.
  LoraCache(LoraLayout layout, std::unique_ptr<AdapterPages> pages, LoraCacheOptions options);
  ~LoraCache();
  LoraCache(const LoraCache&) = delete;
  LoraCache& operator=(const LoraCache&) = delete;

  /// Admits a request's LoraConfig: stores the tensors when they are given, looks the task up otherwise. The
  /// result keeps this generation of the adapter alive and in the host level until it is dropped; each call
  /// counts as one user. Sending the same weights again is a hit; other weights with `replace` make a new
  /// generation, which inherits the pin, and requests that hold the old one keep it. Throws AdapterError
  /// (refused by name; other weights under a cached task_id without `replace`), PeftTaskNotCachedError,
  /// LoraCacheFullError (with the bytes needed and there are; also when the adapter could never fit the
  /// device level together with the pinned ones). Nothing but the counters changes when it throws.
  [[nodiscard]] std::shared_ptr<const HostAdapter> admit(const LoraConfig& config);

  /// Returns the terms of the adapter that admit() would return; nullopt if it is not known, so that admit()
  /// would throw. Changes nothing.
  [[nodiscard]] std::optional<AdapterTerms> terms_of(const LoraConfig& config) const;

  /// Keeps the adapter on the device level while the lease lives; nullopt when it is not there. With load
  /// workers it returns at once. Without, it loads the adapter; nullopt when the pages that would have to go
  /// are all leased or pinned, and it throws what loading threw. Throws AdapterError for an adapter that this
  /// cache did not hand out.
  [[nodiscard]] std::optional<DeviceLease> acquire(const std::shared_ptr<const HostAdapter>& adapter);

  /// Asks for an adapter that will be acquired soon; with load workers, one of them loads it if there is room
  /// and `may_load`. Makes room only of idle adapters that were not ensured in the same turn: calls of one
  /// turn, a number other than 0, come in the order in which the adapters are needed. Without workers nothing
  /// is loaded. Throws AdapterError as acquire().
  [[nodiscard]] AdapterReadiness ensure(const HostAdapter& adapter, std::uint64_t turn, bool may_load = true);
  /// Asks for an adapter that a request will need which no turn has met yet: as ensure() in the newest turn.
  void expect(const HostAdapter& adapter);
  /// Loads that load workers failed to make, each told once.
  [[nodiscard]] std::vector<LoadFailure> take_load_failures();
  [[nodiscard]] bool has_load_workers() const { return !workers_.empty(); }

  /// Pages that could be given now to adapters that are neither leased nor pinned: free ones and those
  /// it may evict. An idle copy's own pages are among them, so an adapter costs pages_needed() whether or not
  /// it is resident.
  [[nodiscard]] std::int64_t obtainable_pages() const;
  /// Device pages of an adapter that admit() handed out.
  [[nodiscard]] std::int64_t pages_needed(const HostAdapter& adapter) const;
  /// True when a lease would take nothing from obtainable_pages(): the adapter is leased by a running
  /// request, or pinned and on the device.
  [[nodiscard]] bool is_leased(const HostAdapter& adapter) const;

  /// Brings an adapter to the device and keeps it on both levels whether or not it is used; returns when it
  /// is there, or when another thread has unpinned or unloaded it meanwhile. Throws PeftTaskNotCachedError,
  /// LoraCacheFullError when there is no room now or when an adapter that a request holds could never fit
  /// together with the pinned ones; nothing changes then. Every call that waits for a load throws what that
  /// load threw; the adapter is not pinned then.
  void pin(std::uint64_t task_id);
  /// The adapter counts as just used. Throws PeftTaskNotCachedError.
  void unpin(std::uint64_t task_id);
  /// Forgets an adapter, pinned or not; one that requests hold goes when the last of them ends, its device
  /// copy with the last lease, and new requests do not see it. Throws PeftTaskNotCachedError.
  void unload(std::uint64_t task_id);
  /// Takes back `admissions` calls of admit() that gave the generation: forgets it, as unload() does, if one
  /// of them stored it. Does nothing where another call gave it as well, where it is pinned, and where it
  /// replaced another generation.
  void withdraw(std::uint64_t generation, std::int64_t admissions) noexcept;
  [[nodiscard]] bool contains(std::uint64_t task_id) const;
  /// The adapters that admit() finds by their id, in ascending order of it.
  [[nodiscard]] std::vector<LoraCacheEntry> list() const;
  [[nodiscard]] LoraCacheStats stats() const;
  [[nodiscard]] const LoraLayout& layout() const;

  /// Everything that does not hold between lists, counters and pages; empty when all is well. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  friend class DeviceLease;
  class Impl;
  std::shared_ptr<Impl> impl_;
  std::vector<std::jthread> workers_;
};

/// Keeps an adapter on the device, and in memory, even when the cache is gone. Movable; giving it up is its
/// destructor.
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
