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
#include <stop_token>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/pack_adapter.h"
#include "free_pages.h"

namespace adaptrt {

/// "LoRA task 7"
[[nodiscard]] std::string task_text(std::uint64_t task_id);
/// Throws LoraCacheFullError.
[[noreturn]] void refuse_full(std::uint64_t task_id, const std::string& reason);

/// Result of one load to the device level, for the threads that wait for it. Changes under the cache's lock.
struct LoadOutcome {
  bool has_ended = false;
  std::exception_ptr error;
};

/// One generation of an adapter in the cache.
struct CacheEntry {
  /// kLoading: its pages are reserved and a load of it waits or is being made.
  enum class Residence : std::uint8_t { kAbsent, kLoading, kResident };
  /// A place in one of a level's lists; moving between them allocates nothing, so giving up a lease cannot
  /// fail.
  using List = std::list<CacheEntry*>;

  // Never changes, so it is read without the lock.
  std::shared_ptr<const HostAdapter> adapter;
  DevicePlan plan;

  // Changes under the lock; `device` does not while there is a lease, `pages` not during a load.
  std::int64_t users = 0;
  std::int64_t leases = 0;
  /// Calls of admit() that gave this generation.
  std::int64_t admissions = 0;
  /// It took the place of another generation of its id.
  bool is_replacement = false;
  bool pinned = false;
  /// admit() finds it by its id; false once it was replaced or unloaded.
  bool listed = true;
  Residence residence = Residence::kAbsent;
  std::vector<std::int64_t> pages;
  DeviceAdapter device;
  /// Loaded, and not leased or pinned since: the first lease is the one that it was loaded for.
  bool is_fresh = false;
  /// The last turn in which ensure() found it on the device or on its way there.
  std::uint64_t turn = 0;
  /// The newest load, which may have ended; null before the first.
  std::shared_ptr<LoadOutcome> newest_load;
  List* host_list = nullptr;
  List::iterator host_place;
  List* device_list = nullptr;
  List::iterator device_place;

  /// By requests or leases.
  [[nodiscard]] bool is_held() const { return users > 0 || leases > 0; }
  /// It cannot leave the cache now.
  [[nodiscard]] bool in_use() const { return is_held() || residence == Residence::kLoading; }
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
  /// Loop of a load worker, until it is stopped.
  void make_loads(const std::stop_token& stop);
  std::int64_t obtainable_pages() const;
  std::int64_t pages_needed(const HostAdapter& adapter) const;
  bool is_leased(const HostAdapter& adapter) const;
  void pin(std::uint64_t task_id);
  void unpin(std::uint64_t task_id);
  void unload(std::uint64_t task_id);
  void withdraw(std::uint64_t generation, std::int64_t admissions) noexcept;
  bool contains(std::uint64_t task_id) const;
  std::vector<LoraCacheEntry> list() const;
  LoraCacheStats stats() const;
  const LoraLayout& layout() const { return layout_; }
  std::vector<std::string> check_invariants() const;

  void release_user(CacheEntry& entry) noexcept;
  void release_lease(CacheEntry& entry) noexcept;

 private:
  using EntryPtr = std::shared_ptr<CacheEntry>;
  /// A load for a worker to make; later, perhaps, one that failed. Moving it between lists allocates nothing.
  struct LoadJob {
    CacheEntry* entry = nullptr;
    LoadFailure failure;
  };
  using LoadJobs = std::list<LoadJob>;
  static LoadJobs make_job(CacheEntry& entry) { return {{&entry, {entry.adapter->generation(), {}}}}; }
  /// Entries that left the cache under the lock. Their memory is released after the lock.
  using Dropped = std::vector<EntryPtr>;
  class User;

  // All of these expect the lock.
  AdapterReadiness ensure(CacheEntry& entry, std::uint64_t turn, bool may_load);
  bool has_untold_failure(const CacheEntry& entry) const;
  CacheEntry* find_listed(std::uint64_t task_id) const;
  CacheEntry& require_listed(std::uint64_t task_id) const;
  CacheEntry& require_known(const HostAdapter& adapter) const;
  void check_beside_pinned(std::uint64_t task_id, std::int64_t pages, std::int64_t pinned_pages) const;
  void check_pin(std::uint64_t task_id, std::int64_t pages, const CacheEntry* pinned,
                 const CacheEntry* replaced) const;
  std::size_t count_host_victims(std::uint64_t task_id, std::size_t bytes, const CacheEntry* replaced) const;
  void insert(const EntryPtr& entry, CacheEntry* replaced, Dropped& dropped);
  /// Takes the entry out of the lookup and, when nothing uses it, out of the cache.
  EntryPtr retire(CacheEntry& entry) noexcept;
  /// Brings lists and cache in line with an entry that is used by one less.
  EntryPtr give_up(CacheEntry& entry) noexcept;
  EntryPtr erase(CacheEntry& entry) noexcept;
  void set_pinned(CacheEntry& entry, bool pinned) noexcept;
  /// Moves the entry to the lists that its state calls for; becoming idle puts it at the recently used end.
  void settle(CacheEntry& entry) noexcept;
  /// Free pages and those of idle adapters that may go in this turn; stops counting at `enough`.
  std::int64_t count_pages_to_get(std::int64_t enough, std::uint64_t turn) const;
  /// Pages of adapters that are leased or pinned: they become free only when they are released or unpinned.
  std::int64_t count_held_pages() const;
  /// Takes pages for a load of an absent entry; false, and nothing done, when there is no room.
  bool reserve_pages(CacheEntry& entry, std::uint64_t turn);
  void drop_device_copy(CacheEntry& entry) noexcept;

  /// Makes the load of an entry whose pages are reserved; gives `lock` up meanwhile. Returns what was thrown;
  /// the pages are gone then.
  std::exception_ptr load(CacheEntry& entry, std::unique_lock<std::mutex>& lock) noexcept;
  void make_load(LoadJobs& job, std::unique_lock<std::mutex>& lock) noexcept;
  void check_ever_fits(std::uint64_t task_id, std::size_t bytes, std::int64_t pages) const;
  std::shared_ptr<const HostAdapter> find(std::uint64_t task_id);
  std::shared_ptr<const HostAdapter> store(const EntryPtr& entry, bool replace);

  const LoraLayout layout_;
  const SiteIndex sites_;
  const std::size_t host_bytes_total_;
  const std::unique_ptr<AdapterPages> pages_;
  const bool has_workers_;
  const std::function<void()> on_load_end_;

  mutable std::mutex mutex_;
  std::condition_variable loaded_;        // some entry is not loading any more
  std::condition_variable_any has_work_;  // for the load workers
  FreePages free_pages_;
  std::unordered_map<std::uint64_t, EntryPtr> entries_;         // by generation
  std::unordered_map<std::uint64_t, CacheEntry*> listed_;       // by task_id
  CacheEntry::List host_busy_, host_idle_;                      // every entry is in one of them
  CacheEntry::List device_absent_, device_busy_, device_idle_;  // likewise
  std::uint64_t newest_turn_ = 1;                               // of ensure()
  LoadJobs queued_loads_;                                       // in the order in which they were asked for
  LoadJobs failed_loads_;                                       // not told yet
  std::int64_t loads_in_flight_ = 0;
  std::size_t host_bytes_used_ = 0;
  std::int64_t idle_pages_ = 0;    // of device_idle_
  std::int64_t pinned_pages_ = 0;  // that pinned entries need, on the device or not
  LoraCacheStats counters_;        // only the counters; sizes are filled in by stats()
};

/// Handle that a request holds; its destructor ends the request's use of the adapter.
class LoraCache::Impl::User {
 public:
  explicit User(std::shared_ptr<Impl> cache) : cache_(std::move(cache)) {}
  ~User() {
    if (entry_ != nullptr) cache_->release_user(*entry_);
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  /// Counts a call of admit() that gives the entry. Expects the cache's lock.
  void admit(CacheEntry& entry) noexcept {
    ++entry.admissions;
    hold(entry);
  }
  /// Expects the cache's lock.
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

  /// Takes over a lease that was counted already.
  void own(CacheEntry& entry) noexcept { entry_ = &entry; }
  [[nodiscard]] const DeviceAdapter& adapter() const { return entry_->device; }

 private:
  std::shared_ptr<LoraCache::Impl> cache_;
  CacheEntry* entry_ = nullptr;
};

}  // namespace adaptrt
