#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/pack_adapter.h"
#include "adaptrt/lora/shared_matrices.h"
#include "free_pages.h"

namespace adaptrt {

/// Returns "LoRA task 7".
[[nodiscard]] std::string task_text(std::uint64_t task_id);
/// Throws LoraCacheFullError.
[[noreturn]] void refuse_full(std::uint64_t task_id, const std::string& reason);

/// Result of one load to the device level, for waiting threads. Changes only under the cache's lock.
struct LoadOutcome {
  bool has_ended = false;
  std::exception_ptr error;
};

/// One generation of an adapter in the cache.
struct CacheEntry {
  enum class Residence : std::uint8_t {
    kAbsent,
    kLoading,   ///< its pages are reserved, and a load is queued or running
    kArriving,  ///< its copies are enqueued; it can be leased, because steps wait for them
    kResident,
    kFailed,  ///< its copies failed while it was leased; its pages are given back with the last lease
  };
  /// One of a level's lists. Moving between lists allocates nothing, so releasing a lease cannot fail.
  using List = std::list<CacheEntry*>;

  // Constant, so read without the lock.
  std::shared_ptr<const HostAdapter> adapter;
  DevicePlan plan;

  // Changed only under the lock. `device` is constant during a lease, or always if it refers to the host
  // level, and `pages` during a load.
  std::int64_t users = 0;
  std::int64_t leases = 0;
  /// Number of admit() calls that returned this generation.
  std::int64_t admissions = 0;
  /// True if it replaced another generation with its id.
  bool is_replacement = false;
  bool pinned = false;
  bool outdated = false;
  /// True if admit() finds it by id; false after it was replaced or unloaded.
  bool listed = true;
  Residence residence = Residence::kAbsent;
  std::vector<std::int64_t> pages;
  DeviceAdapter device;
  /// True if it was loaded and not leased or pinned since: its first lease is the one that caused the load.
  bool is_fresh = false;
  /// The last turn in which ensure() found it loaded or loading.
  std::uint64_t turn = 0;
  /// The newest load, which may have ended; nullptr before the first.
  std::shared_ptr<LoadOutcome> newest_load;
  List* host_list = nullptr;
  List::iterator host_place;
  List* device_list = nullptr;
  List::iterator device_place;

  /// True if requests or leases hold it.
  [[nodiscard]] bool is_held() const { return users > 0 || leases > 0; }
  /// True if a load is queued or running, and so reads the host level and writes the pages.
  [[nodiscard]] bool is_loading() const {
    return residence == Residence::kLoading || residence == Residence::kArriving;
  }
  /// True if it can be leased.
  [[nodiscard]] bool is_ready() const {
    return residence == Residence::kArriving || residence == Residence::kResident;
  }
  /// True if it cannot leave the cache now.
  [[nodiscard]] bool in_use() const { return is_held() || is_loading(); }
};

using Residence = CacheEntry::Residence;

class LoraCache::Impl : public std::enable_shared_from_this<LoraCache::Impl> {
 public:
  Impl(LoraLayout layout, std::unique_ptr<AdapterPages> pages, LoraCacheOptions options);

  std::shared_ptr<const HostAdapter> admit(const LoraConfig& config);
  std::optional<AdapterTerms> terms_of(const LoraConfig& config) const;
  std::optional<DeviceLease> acquire(const HostAdapter& adapter);
  AdapterReadiness ensure(const HostAdapter& adapter, std::uint64_t turn, bool may_load);
  void expect(const HostAdapter& adapter);
  std::vector<LoadFailure> take_load_failures();
  /// Runs a load worker until it is stopped.
  void make_loads(const std::stop_token& stop);
  std::int64_t obtainable_pages() const;
  std::int64_t pages_needed(const HostAdapter& adapter) const;
  bool is_leased(const HostAdapter& adapter) const;
  void pin(std::uint64_t task_id);
  void unpin(std::uint64_t task_id);
  void unload(std::uint64_t task_id);
  void set_outdated(std::uint64_t task_id, bool outdated) noexcept;
  void withdraw(std::uint64_t generation, std::int64_t admissions) noexcept;
  bool contains(std::uint64_t task_id) const;
  std::vector<LoraCacheEntry> list() const;
  LoraCacheStats stats() const;
  void count_waiting_step();
  const LoraLayout& layout() const { return layout_; }
  std::vector<std::string> check_invariants() const;

  void release_user(CacheEntry& entry) noexcept;
  void release_lease(CacheEntry& entry) noexcept;

 private:
  using EntryPtr = std::shared_ptr<CacheEntry>;
  /// A load for a worker, or later a load that failed. Moving it between lists allocates nothing.
  struct LoadJob {
    CacheEntry* entry = nullptr;
    LoadFailure failure;
  };
  using LoadJobs = std::list<LoadJob>;
  static LoadJobs make_job(CacheEntry& entry) { return {{&entry, {entry.adapter->generation(), {}}}}; }
  /// Entries removed from the cache under the lock. Their memory is freed after the lock is released.
  using Dropped = std::vector<EntryPtr>;
  class User;

  // Call all of these with the lock held.
  AdapterReadiness ensure(CacheEntry& entry, std::uint64_t turn, bool may_load);
  bool has_untold_failure(const CacheEntry& entry) const;
  CacheEntry* find_listed(std::uint64_t task_id) const;
  CacheEntry& require_listed(std::uint64_t task_id) const;
  CacheEntry& require_known(const HostAdapter& adapter) const;
  void check_beside_pinned(std::uint64_t task_id, std::int64_t pages, std::int64_t pinned_pages) const;
  void check_pin(std::uint64_t task_id, std::int64_t pages, const CacheEntry* pinned,
                 const CacheEntry* replaced) const;
  std::size_t count_host_victims(const HostAdapter& adapter, const CacheEntry* replaced) const;
  /// Count the bytes and savings of an adapter that enters or leaves the host level.
  void count_in(const HostAdapter& adapter) noexcept;
  void count_out(const HostAdapter& adapter) noexcept;
  void insert(const EntryPtr& entry, CacheEntry* replaced, Dropped& dropped);
  /// Returns the host level's size after an adapter of this size has come.
  std::size_t grown_host_bytes(std::size_t bytes) const noexcept;
  /// Returns pinned memory for a new adapter; see AdapterPages. The host level makes room for the adapter
  /// only after its checks, so its bytes come on top of the level's.
  std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes);
  /// Grows the levels for adapters of this size.
  void grow_for(std::size_t bytes, std::int64_t pages) noexcept;
  /// Removes the entry from the lookup and, if unused, from the cache.
  EntryPtr retire(CacheEntry& entry) noexcept;
  /// Updates lists and cache after an entry lost a user.
  EntryPtr give_up(CacheEntry& entry) noexcept;
  EntryPtr erase(CacheEntry& entry) noexcept;
  void set_pinned(CacheEntry& entry, bool pinned) noexcept;
  /// Moves the entry to the lists for its state; an entry that becomes idle goes to the recently used end.
  void settle(CacheEntry& entry) noexcept;
  /// Returns the position at which the entry joins a list: the end, or the end of the outdated ones.
  static CacheEntry::List::iterator find_place(const CacheEntry& entry, CacheEntry::List& list) noexcept;
  /// Counts free pages and pages of idle adapters that may be evicted in this turn; stops at `enough`.
  std::int64_t count_pages_to_get(std::int64_t enough, std::uint64_t turn) const;
  /// Counts pages of leased or pinned adapters, which become free only after release or unpin.
  std::int64_t count_held_pages() const;
  /// Takes pages for a load of an absent entry; returns false, and changes nothing, if there is no room. If
  /// the device level refers to the host level, the load has then ended.
  bool reserve_pages(CacheEntry& entry, std::uint64_t turn);
  void drop_device_copy(CacheEntry& entry) noexcept;

  /// Loads an entry whose pages are reserved; releases `lock` meanwhile. Returns the error, if any; the pages
  /// are then released.
  std::exception_ptr load(CacheEntry& entry, std::unique_lock<std::mutex>& lock) noexcept;
  /// Packs an adapter into its pages, without the lock. `addresses`: of the pages, on the device.
  DeviceAdapter pack(const CacheEntry& entry, std::span<std::byte* const> addresses);
  /// The entry can be leased from now on, while its copies run. Call it without the lock.
  void announce(CacheEntry& entry, DeviceAdapter adapter) noexcept;
  void make_load(LoadJobs& job, std::unique_lock<std::mutex>& lock) noexcept;
  void check_ever_fits(std::uint64_t task_id, std::size_t bytes, std::int64_t pages) const;
  std::shared_ptr<const HostAdapter> find(std::uint64_t task_id);
  std::shared_ptr<const HostAdapter> store(const EntryPtr& entry, bool replace);

  const LoraLayout layout_;
  const SiteIndex sites_;
  const std::size_t max_host_bytes_;
  /// LoraCacheOptions::num_adapters.
  const std::int32_t num_adapters_;
  const std::unique_ptr<AdapterPages> pages_;
  /// True if the host level keeps adapters packed; otherwise as sent.
  const bool packs_adapters_;
  /// True if the device level refers to the host level's packed adapters.
  const bool refers_to_host_;
  /// Matrices that adapters share; nullptr if the device level has copies.
  const std::shared_ptr<SharedMatrices> matrices_;
  const LoraStorage storage_;
  const bool has_workers_;
  const std::int32_t num_admit_threads_;
  const std::function<void()> on_load_end_;

  mutable std::mutex mutex_;
  std::condition_variable loaded_;        // some entry is no longer loading
  std::condition_variable_any has_work_;  // for the load workers
  FreePages free_pages_;
  std::unordered_map<std::uint64_t, EntryPtr> entries_;    // by generation
  std::unordered_map<std::uint64_t, CacheEntry*> listed_;  // by task_id
  // Every entry is in one of the host lists and in one of the device lists. Idle lists have the outdated
  // entries first.
  CacheEntry::List host_busy_, host_idle_;
  CacheEntry::List device_absent_, device_busy_, device_idle_;
  std::uint64_t newest_turn_ = 1;  // of ensure()
  LoadJobs queued_loads_;          // in the order of the requests for them
  LoadJobs failed_loads_;          // not reported yet
  std::int64_t loads_in_flight_ = 0;
  std::size_t host_bytes_total_;
  std::size_t host_bytes_used_ = 0;
  std::size_t unshared_bytes_ = 0;  // sum of HostAdapter::unshared_bytes()
  std::int64_t saved_products_ = 0;
  std::size_t largest_bytes_ = 0;  // of an adapter so far
  std::int64_t largest_pages_ = 0;
  std::int64_t idle_pages_ = 0;    // in device_idle_
  std::int64_t pinned_pages_ = 0;  // needed by pinned entries, loaded or not
  LoraCacheStats counters_;        // only the counters; stats() fills in the sizes
};

/// Handle held by a request; its destructor ends the request's use of the adapter.
class LoraCache::Impl::User {
 public:
  explicit User(std::shared_ptr<Impl> cache) : cache_(std::move(cache)) {}
  ~User() {
    if (entry_ != nullptr) cache_->release_user(*entry_);
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  /// Counts a call of admit() that returns the entry. Call it with the cache's lock held.
  void admit(CacheEntry& entry) noexcept {
    ++entry.admissions;
    hold(entry);
  }
  /// Call it with the cache's lock held.
  void hold(CacheEntry& entry) noexcept {
    entry_ = &entry;
    ++entry.users;
    cache_->settle(entry);
  }
  [[nodiscard]] const HostAdapter* adapter() const { return entry_->adapter.get(); }

 private:
  std::shared_ptr<Impl> cache_;
  CacheEntry* entry_ = nullptr;
};

class DeviceLease::Impl {
 public:
  explicit Impl(std::shared_ptr<LoraCache::Impl> cache) : cache_(std::move(cache)) {}
  ~Impl() {
    if (entry_ != nullptr) cache_->release_lease(*entry_);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Takes over a lease that is already counted.
  void own(CacheEntry& entry) noexcept { entry_ = &entry; }
  [[nodiscard]] const DeviceAdapter& adapter() const { return entry_->device; }

 private:
  std::shared_ptr<LoraCache::Impl> cache_;
  CacheEntry* entry_ = nullptr;
};

}  // namespace adaptrt
