#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Sizes in bytes and pages, already resolved from PeftCacheConfig (see resolve_cache_sizes).
struct LoraCacheSizes {
  std::size_t host_bytes = 0;
  std::size_t page_bytes = 0;
  std::int64_t device_pages = 0;
};

/// What the two levels have done so far and hold now.
struct LoraCacheStats {
  std::int64_t host_hits = 0;
  std::int64_t host_misses = 0;
  std::int64_t host_evictions = 0;
  std::int64_t device_hits = 0;
  std::int64_t device_misses = 0;
  std::int64_t device_evictions = 0;
  std::int64_t host_adapters = 0;
  std::int64_t device_adapters = 0;
  std::size_t host_bytes_used = 0;
  std::size_t host_bytes_total = 0;
  std::size_t page_bytes = 0;
  std::int64_t device_pages_used = 0;
  std::int64_t device_pages_total = 0;
  double load_seconds = 0.0;  ///< total time spent packing adapters for the device
};

/// One row of LoraCache::list().
struct LoraCacheEntry {
  std::uint64_t task_id = 0;
  std::size_t host_bytes = 0;
  std::int64_t device_pages = 0;  ///< needed when on the device
  bool on_device = false;
  bool pinned = false;
  std::int64_t users = 0;  ///< requests that hold it
};

class DeviceLease;

/// The two-level LoRA cache. Host: adapters as submitted, checked. Device: the kernels' layout, in pages. Least recently
/// used goes first on both levels, only as many as are needed, never one that a request holds or that is pinned.
/// Thread-safe; a DeviceAdapter is read without a lock while its lease lives.
class LoraCache {
 public:
  LoraCache(LoraLayout layout, LoraCacheSizes sizes);
  ~LoraCache();

  /// What a request does with its LoraConfig: stores the tensors when they are given, looks the task up otherwise.
  /// The result keeps this generation of the adapter alive and in the host level until it is dropped.
  /// Throws AdapterError (refused by name; other weights under a cached task_id without `replace`),
  /// PeftTaskNotCachedError, LoraCacheFullError (with the bytes needed and there are; also when the adapter could
  /// never fit the device level). Nothing changes when it throws.
  [[nodiscard]] std::shared_ptr<const HostAdapter> admit(const LoraConfig& config);

  /// Brings the adapter to the device level and keeps it there while the lease lives; nullopt when the pages that
  /// would have to go are all leased or pinned. Never throws for lack of room.
  [[nodiscard]] std::optional<DeviceLease> acquire(const std::shared_ptr<const HostAdapter>& adapter);

  /// Pages that acquire() could give now to adapters other than those leased: free ones and ones it may evict.
  [[nodiscard]] std::int64_t obtainable_pages() const;
  /// True when acquire() would need no page: the adapter is already leased by a running request.
  [[nodiscard]] bool is_leased(const HostAdapter& adapter) const;

  /// Keep an adapter on both levels whether or not it is used. Throws PeftTaskNotCachedError, LoraCacheFullError.
  void pin(std::uint64_t task_id);
  void unpin(std::uint64_t task_id);
  /// Forgets an adapter; one that requests hold goes when the last of them ends, and new requests do not see it.
  void unload(std::uint64_t task_id);
  [[nodiscard]] bool contains(std::uint64_t task_id) const;
  [[nodiscard]] std::vector<LoraCacheEntry> list() const;
  [[nodiscard]] LoraCacheStats stats() const;
  [[nodiscard]] const LoraLayout& layout() const;

  /// Everything that does not hold between lists, counters and pages; empty when all is well. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  friend class DeviceLease;
  class Impl;
  std::shared_ptr<Impl> impl_;
};

/// Keeps an adapter on the device. Movable; giving it up is its destructor.
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
