// The device level: pages, leases and pins.

#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "lora_cache_impl.h"

namespace adaptrt {

std::optional<DeviceLease> LoraCache::Impl::acquire(const HostAdapter& adapter) {
  auto lease = std::make_unique<DeviceLease::Impl>(shared_from_this());
  std::unique_lock lock(mutex_);
  CacheEntry& entry = require_known(adapter);
  loaded_.wait(lock, [&] { return entry.residence != Residence::kLoading; });
  if (entry.residence == Residence::kResident) {
    ++counters_.device_hits;
    ++entry.leases;
    settle(entry);
  } else {
    if (!reserve_pages(entry)) return std::nullopt;
    load(entry, lock);
  }
  lease->own(entry);
  return DeviceLease(std::move(lease));
}

bool LoraCache::Impl::reserve_pages(CacheEntry& entry) {
  const std::int64_t needed = entry.plan.pages;
  if (free_pages_.count() + idle_pages_ < needed) return false;
  entry.pages.reserve(static_cast<std::size_t>(needed));
  while (free_pages_.count() < needed) {
    ++counters_.device_evictions;
    drop_device_copy(*device_idle_.front());
  }
  for (std::int64_t i = 0; i < needed; ++i) entry.pages.push_back(free_pages_.take());
  ++counters_.device_misses;
  entry.residence = Residence::kLoading;
  ++entry.leases;
  settle(entry);
  return true;
}

void LoraCache::Impl::load(CacheEntry& entry, std::unique_lock<std::mutex>& lock) {
  try {
    std::vector<std::byte*> addresses;
    for (const std::int64_t page : entry.pages) addresses.push_back(pages_->address(page));
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    DeviceAdapter packed;
    pages_->load(entry.pages, [&](std::span<std::byte* const> host_pages) {
      packed = pack_adapter(*entry.adapter, layout_, entry.plan, host_pages, addresses);
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    lock.lock();
    entry.device = std::move(packed);
    entry.residence = Residence::kResident;
    counters_.load_seconds += elapsed.count();
    settle(entry);
    loaded_.notify_all();
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    --entry.leases;
    drop_device_copy(entry);
    settle(entry);
    loaded_.notify_all();
    throw;
  }
}

void LoraCache::Impl::drop_device_copy(CacheEntry& entry) noexcept {
  if (entry.device_list == &device_idle_) idle_pages_ -= entry.plan.pages;
  for (const std::int64_t page : entry.pages) free_pages_.give_back(page);
  entry.pages.clear();
  entry.device = {};
  entry.residence = Residence::kAbsent;
  device_absent_.splice(device_absent_.end(), *entry.device_list, entry.device_place);
  entry.device_list = &device_absent_;
}

void LoraCache::Impl::settle(CacheEntry& entry) noexcept {
  CacheEntry::List* host = entry.in_use() || entry.pinned ? &host_busy_ : &host_idle_;
  if (host != entry.host_list) {
    host->splice(host->end(), *entry.host_list, entry.host_place);
    entry.host_list = host;
  }
  CacheEntry::List* device = &device_absent_;
  if (entry.residence != Residence::kAbsent) {
    device = entry.leases > 0 || entry.pinned ? &device_busy_ : &device_idle_;
  }
  if (device != entry.device_list) {
    if (entry.device_list == &device_idle_) idle_pages_ -= entry.plan.pages;
    if (device == &device_idle_) idle_pages_ += entry.plan.pages;
    device->splice(device->end(), *entry.device_list, entry.device_place);
    entry.device_list = device;
  }
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
  EntryPtr dropped;
  std::unique_lock lock(mutex_);
  CacheEntry& entry = require_listed(task_id);
  if (entry.pinned) return;
  check_pin(task_id, entry.plan.pages, &entry, nullptr);
  if (entry.residence != Residence::kAbsent) {
    set_pinned(entry, true);
    return;
  }
  if (!reserve_pages(entry)) {
    refuse_full(task_id, "needs " + std::to_string(entry.plan.pages) +
                             " device pages, but running requests and pinned adapters leave " +
                             std::to_string(free_pages_.count() + idle_pages_) + " of " +
                             std::to_string(free_pages_.total()));
  }
  // Neither pinned nor leased while it is packed, it could be unloaded: a user keeps it.
  user->hold(entry);
  set_pinned(entry, true);
  try {
    load(entry, lock);
  } catch (...) {
    set_pinned(entry, false);
    throw;
  }
  dropped = end_lease(entry);
}

void LoraCache::Impl::unpin(std::uint64_t task_id) {
  const std::lock_guard lock(mutex_);
  set_pinned(require_listed(task_id), false);
}

}  // namespace adaptrt
