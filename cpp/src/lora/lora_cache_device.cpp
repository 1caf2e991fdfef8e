// The device level: pages, leases and pins.

#include <algorithm>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "lora_cache_impl.h"

namespace adaptrt {

std::optional<DeviceLease> LoraCache::Impl::acquire(const HostAdapter& adapter) {
  auto lease = std::make_unique<DeviceLease::Impl>(shared_from_this());
  std::unique_lock lock(mutex_);
  CacheEntry& entry = require_known(adapter);
  while (!has_workers_ && entry.residence != Residence::kResident) {
    if (entry.residence == Residence::kLoading) {
      loaded_.wait(lock);
      continue;
    }
    if (!reserve_pages(entry, 0)) return std::nullopt;
    if (entry.residence == Residence::kResident) break;
    if (const auto error = load(entry, lock)) std::rethrow_exception(error);
  }
  if (!entry.is_ready()) return std::nullopt;
  if (!std::exchange(entry.is_fresh, false)) ++counters_.device_hits;
  ++entry.leases;
  settle(entry);
  lease->own(entry);
  return DeviceLease(std::move(lease));
}

AdapterReadiness LoraCache::Impl::ensure(const HostAdapter& adapter, std::uint64_t turn, bool may_load) {
  const std::lock_guard lock(mutex_);
  newest_turn_ = turn;
  return ensure(require_known(adapter), turn, may_load);
}

void LoraCache::Impl::expect(const HostAdapter& adapter) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(ensure(require_known(adapter), newest_turn_, true));
}

AdapterReadiness LoraCache::Impl::ensure(CacheEntry& entry, std::uint64_t turn, bool may_load) {
  using enum AdapterReadiness;
  if (entry.residence != Residence::kAbsent) {
    // A load can end within the turn. Its adapter must not be evicted for a later request.
    entry.turn = turn;
    return entry.is_ready() ? kReady : kLoading;
  }
  // A load can also fail within the turn: report that to its waiters before the next try.
  if (has_untold_failure(entry)) return kLoading;
  const std::int64_t needed = entry.plan.pages;
  // Without workers, acquire() may take pages that others of the turn need.
  const std::uint64_t kept = has_workers_ ? turn : 0;
  if (count_pages_to_get(needed, kept) < needed) {
    if (needed > free_pages_.total() - count_held_pages()) return kNoRoom;
    return needed <= count_pages_to_get(needed, 0) ? kAwaitsOthers : kAwaitsLoads;
  }
  if (!has_workers_) return kReady;
  if (!may_load) return kAwaitsOthers;
  LoadJobs job = make_job(entry);  // before anything changes
  static_cast<void>(reserve_pages(entry, turn));
  entry.turn = turn;
  if (entry.residence == Residence::kResident) return kReady;
  queued_loads_.splice(queued_loads_.end(), job);
  has_work_.notify_one();
  return kLoading;
}

bool LoraCache::Impl::has_untold_failure(const CacheEntry& entry) const {
  return std::ranges::any_of(failed_loads_, [&](const LoadJob& job) {
    return job.failure.generation == entry.adapter->generation();
  });
}

std::int64_t LoraCache::Impl::count_pages_to_get(std::int64_t enough, std::uint64_t turn) const {
  std::int64_t pages = free_pages_.count();
  if (turn == 0) return pages + idle_pages_;
  for (auto idle = device_idle_.begin(); idle != device_idle_.end() && pages < enough; ++idle) {
    if ((*idle)->turn != turn) pages += (*idle)->plan.pages;
  }
  return pages;
}

std::int64_t LoraCache::Impl::count_held_pages() const {
  std::int64_t pages = 0;
  for (const CacheEntry* busy : device_busy_) {
    if (busy->leases > 0 || busy->pinned) pages += busy->plan.pages;
  }
  return pages;
}

bool LoraCache::Impl::reserve_pages(CacheEntry& entry, std::uint64_t turn) {
  const std::int64_t needed = entry.plan.pages;
  if (count_pages_to_get(needed, turn) < needed) return false;
  auto outcome = std::make_shared<LoadOutcome>();
  entry.pages.reserve(static_cast<std::size_t>(needed));
  for (auto next = device_idle_.begin(); free_pages_.count() < needed;) {
    CacheEntry& idle = **next++;
    if (turn != 0 && idle.turn == turn) continue;
    ++counters_.device_evictions;
    drop_device_copy(idle);
  }
  for (std::int64_t i = 0; i < needed; ++i) entry.pages.push_back(free_pages_.take());
  ++counters_.device_misses;
  outcome->has_ended = refers_to_host_;
  entry.is_fresh = refers_to_host_;
  if (!refers_to_host_) ++loads_in_flight_;
  entry.residence = refers_to_host_ ? Residence::kResident : Residence::kLoading;
  entry.newest_load = std::move(outcome);
  settle(entry);
  return true;
}

void LoraCache::Impl::drop_device_copy(CacheEntry& entry) noexcept {
  if (entry.device_list == &device_idle_) idle_pages_ -= entry.plan.pages;
  for (const std::int64_t page : entry.pages) free_pages_.give_back(page);
  entry.pages.clear();
  if (!refers_to_host_) entry.device = {};
  entry.residence = Residence::kAbsent;
  device_absent_.splice(device_absent_.end(), *entry.device_list, entry.device_place);
  entry.device_list = &device_absent_;
}

void LoraCache::Impl::settle(CacheEntry& entry) noexcept {
  CacheEntry::List* host = entry.in_use() || entry.pinned ? &host_busy_ : &host_idle_;
  if (host != entry.host_list) {
    host->splice(find_place(entry, *host), *entry.host_list, entry.host_place);
    entry.host_list = host;
  }
  CacheEntry::List* device = &device_absent_;
  if (entry.residence != Residence::kAbsent) {
    const bool stays = entry.leases > 0 || entry.pinned || entry.is_loading();
    device = stays ? &device_busy_ : &device_idle_;
  }
  if (device != entry.device_list) {
    if (entry.device_list == &device_idle_) idle_pages_ -= entry.plan.pages;
    if (device == &device_idle_) idle_pages_ += entry.plan.pages;
    device->splice(find_place(entry, *device), *entry.device_list, entry.device_place);
    entry.device_list = device;
  }
}

CacheEntry::List::iterator LoraCache::Impl::find_place(const CacheEntry& entry,
                                                       CacheEntry::List& list) noexcept {
  if (!entry.outdated) return list.end();
  return std::ranges::find_if(list, [&](const CacheEntry* other) { return !other->outdated; });
}

void LoraCache::Impl::set_outdated(std::uint64_t task_id, bool outdated) noexcept {
  const std::lock_guard lock(mutex_);
  CacheEntry* entry = find_listed(task_id);
  if (entry == nullptr || entry->outdated == outdated) return;
  entry->outdated = outdated;
  // Neither place is that of another list, so splicing within one list is enough.
  entry->host_list->splice(find_place(*entry, *entry->host_list), *entry->host_list, entry->host_place);
  entry->device_list->splice(find_place(*entry, *entry->device_list), *entry->device_list,
                             entry->device_place);
}

std::int64_t LoraCache::Impl::obtainable_pages() const {
  const std::lock_guard lock(mutex_);
  return free_pages_.count() + idle_pages_;
}

std::int64_t LoraCache::Impl::pages_needed(const HostAdapter& adapter) const {
  const std::lock_guard lock(mutex_);
  return require_known(adapter).plan.pages;
}

bool LoraCache::Impl::is_leased(const HostAdapter& adapter) const {
  const std::lock_guard lock(mutex_);
  const CacheEntry& entry = require_known(adapter);
  return entry.leases > 0 || (entry.pinned && entry.residence == Residence::kResident);
}

void LoraCache::Impl::set_pinned(CacheEntry& entry, bool pinned) noexcept {
  if (entry.pinned != pinned) pinned_pages_ += pinned ? entry.plan.pages : -entry.plan.pages;
  entry.pinned = pinned;
  settle(entry);
}

void LoraCache::Impl::pin(std::uint64_t task_id) {
  const auto user = std::make_shared<User>(shared_from_this());
  bool loads_here = false;
  std::exception_ptr error;
  {
    std::unique_lock lock(mutex_);
    CacheEntry& entry = require_listed(task_id);
    // A pinned adapter may still be loading, or absent where it inherited its pin.
    if (entry.pinned && entry.residence == Residence::kResident) return;
    if (!entry.pinned) check_pin(task_id, entry.plan.pages, &entry, nullptr);
    if (entry.residence == Residence::kAbsent) {
      LoadJobs job = make_job(entry);  // before anything changes
      if (!reserve_pages(entry, 0)) {
        refuse_full(task_id, "needs " + std::to_string(entry.plan.pages) +
                                 " device pages, but running requests, loads and pinned adapters leave " +
                                 std::to_string(free_pages_.count() + idle_pages_) + " of " +
                                 std::to_string(free_pages_.total()));
      }
      const bool is_loading = entry.residence == Residence::kLoading;
      loads_here = is_loading && !has_workers_;
      if (is_loading && has_workers_) queued_loads_.splice(queued_loads_.end(), job);
      has_work_.notify_one();
    }
    // A user keeps the entry if it is unloaded or unpinned meanwhile.
    user->hold(entry);
    set_pinned(entry, true);
    const std::shared_ptr<const LoadOutcome> outcome = entry.newest_load;
    if (loads_here) static_cast<void>(load(entry, lock));
    loaded_.wait(lock, [&] { return outcome->has_ended; });
    entry.is_fresh = false;
    error = outcome->error;
    // Another thread may have started a new load since this failure, and pin with that one.
    if (error && !entry.is_loading() && !entry.is_ready()) set_pinned(entry, false);
  }
  if (loads_here && on_load_end_) on_load_end_();
  if (error) std::rethrow_exception(error);
}

void LoraCache::Impl::unpin(std::uint64_t task_id) {
  const std::lock_guard lock(mutex_);
  set_pinned(require_listed(task_id), false);
}

}  // namespace adaptrt
