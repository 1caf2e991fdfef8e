// The host level: how adapters enter and leave the cache.

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "adaptrt/core/error.h"
#include "config_rows.h"
#include "lora_cache_impl.h"

namespace adaptrt {
namespace {

/// Bytes that the host level needs for an adapter in addition to the matrices that it has.
std::size_t bytes_to_add(const HostAdapter& adapter) {
  std::size_t bytes = adapter.own_bytes();
  for (const auto& matrix : adapter.matrices()) {
    if (matrix->users == 0) bytes += matrix->memory_bytes();
  }
  return bytes;
}

/// Adds up what becomes free when adapters leave the host level.
class FreedBytes {
 public:
  /// `stored`: an adapter that enters it, and keeps the matrices that it shares.
  explicit FreedBytes(const HostAdapter& stored) {
    for (const auto& matrix : stored.matrices()) kept_.insert(matrix.get());
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  void add(const HostAdapter& adapter) {
    bytes_ += adapter.own_bytes();
    for (const auto& matrix : adapter.matrices()) {
      if (kept_.contains(matrix.get())) continue;
      if (++leaving_users_[matrix.get()] == matrix->users) bytes_ += matrix->memory_bytes();
    }
  }

 private:
  std::size_t bytes_ = 0;
  std::unordered_set<const SharedMatrix*> kept_;
  std::unordered_map<const SharedMatrix*, std::int64_t> leaving_users_;
};

}  // namespace

std::shared_ptr<const HostAdapter> LoraCache::Impl::admit(const LoraConfig& config) {
  if (!config.weights && !config.config) return find(config.task_id);
  auto entry = std::make_shared<CacheEntry>();
  if (packs_adapters_) {
    entry->adapter = HostAdapter::make_packed(
        config, layout_, sites_, pages_->page_bytes(), matrices_.get(), storage_,
        [this](std::size_t bytes) { return allocate_pinned(bytes); }, num_admit_threads_);
    entry->plan = entry->adapter->plan();
  } else {
    entry->adapter = HostAdapter::make(config, layout_, sites_, storage_);
    entry->plan = plan_device_images(entry->adapter->rows(), layout_, sites_, pages_->page_bytes(),
                                     entry->adapter->stored_parts().image_bytes);
  }
  if (refers_to_host_) entry->device = device_adapter_in_place(*entry->adapter, layout_);
  check_ever_fits(config.task_id, entry->adapter->bytes(), entry->plan.pages);
  return store(entry, config.replace);
}

std::optional<AdapterTerms> LoraCache::Impl::terms_of(const LoraConfig& config) const {
  if (config.config) return terms_of_config(*config.config);
  const std::lock_guard lock(mutex_);
  const CacheEntry* entry = find_listed(config.task_id);
  if (entry == nullptr) return std::nullopt;
  return entry->adapter->terms();
}

std::shared_ptr<const HostAdapter> LoraCache::Impl::find(std::uint64_t task_id) {
  auto user = std::make_shared<User>(shared_from_this());
  const std::lock_guard lock(mutex_);
  CacheEntry* entry = find_listed(task_id);
  if (entry == nullptr) {
    ++counters_.host_misses;
    throw PeftTaskNotCachedError(task_text(task_id) +
                                 " not found in cache. Please send LoRA weights with request");
  }
  if (!entry->pinned) check_beside_pinned(task_id, entry->plan.pages, pinned_pages_);
  ++counters_.host_hits;
  user->admit(*entry);
  return {user, user->adapter()};
}

std::shared_ptr<const HostAdapter> LoraCache::Impl::store(const EntryPtr& entry, bool replace) {
  auto user = std::make_shared<User>(shared_from_this());
  const HostAdapter& adapter = *entry->adapter;
  const std::uint64_t task_id = adapter.task_id();
  Dropped dropped;
  std::shared_ptr<const HostAdapter> compared;
  bool same = false;
  std::unique_lock lock(mutex_);
  CacheEntry* cached = find_listed(task_id);
  while (cached != nullptr && cached->adapter != compared) {
    // Comparing reads every byte, so it runs outside the lock; another generation may replace it meanwhile.
    compared = cached->adapter;
    lock.unlock();
    same = compared->same_weights(adapter);
    lock.lock();
    cached = find_listed(task_id);
  }
  if (cached != nullptr && same) {
    if (!cached->pinned) check_beside_pinned(task_id, cached->plan.pages, pinned_pages_);
    ++counters_.host_hits;
    user->admit(*cached);
    return {user, user->adapter()};
  }
  if (cached != nullptr && !replace) {
    throw AdapterError(task_text(task_id) +
                       ": is cached with other weights; send them with replace=True to exchange them");
  }
  insert(entry, cached, dropped);
  ++counters_.host_misses;
  user->admit(*entry);
  return {user, user->adapter()};
}

void LoraCache::Impl::check_ever_fits(std::uint64_t task_id, std::size_t bytes, std::int64_t pages) const {
  if (bytes > max_host_bytes_) {
    refuse_full(task_id, "needs " + std::to_string(bytes) + " bytes, but the host level has " +
                             std::to_string(max_host_bytes_) + " in all");
  }
  if (pages > free_pages_.most()) {
    const auto text = [&](std::int64_t count) {
      return std::to_string(static_cast<std::size_t>(count) * pages_->page_bytes()) + " bytes (" +
             std::to_string(count) + " pages)";
    };
    refuse_full(task_id, "needs " + text(pages) + ", but the device level has " + text(free_pages_.most()) +
                             " in all");
  }
}

/// A request's adapter must fit the device together with the pinned ones, or the request would wait
/// indefinitely.
void LoraCache::Impl::check_beside_pinned(std::uint64_t task_id, std::int64_t pages,
                                          std::int64_t pinned_pages) const {
  if (pages + pinned_pages <= free_pages_.total()) return;
  refuse_full(task_id, "needs " + std::to_string(pages) + " device pages, but pinned adapters keep " +
                           std::to_string(pinned_pages) + " of " + std::to_string(free_pages_.total()));
}

/// Checks that pinning `pages` leaves every adapter in use enough room on the device. `pinned` is the entry
/// to pin if it is already cached, `replaced` the one whose pin it inherits.
void LoraCache::Impl::check_pin(std::uint64_t task_id, std::int64_t pages, const CacheEntry* pinned,
                                const CacheEntry* replaced) const {
  const std::int64_t others = pinned_pages_ - (replaced != nullptr ? replaced->plan.pages : 0);
  check_beside_pinned(task_id, pages, others);
  for (const auto& [generation, entry] : entries_) {
    const bool stays_pinned = entry->pinned && entry.get() != replaced;
    if (entry.get() == pinned || stays_pinned || !entry->is_held()) continue;
    if (entry->plan.pages + others + pages > free_pages_.total()) {
      refuse_full(task_id, "pinned adapters would keep " + std::to_string(others + pages) + " of " +
                               std::to_string(free_pages_.total()) + " device pages, but task " +
                               std::to_string(entry->adapter->task_id()) + ", which a request holds, needs " +
                               std::to_string(entry->plan.pages));
    }
  }
}

/// Number of adapters, the least recently used first, that must leave the host level to make room for an
/// adapter.
std::size_t LoraCache::Impl::count_host_victims(const HostAdapter& adapter,
                                                const CacheEntry* replaced) const {
  const std::size_t bytes = bytes_to_add(adapter);
  const std::size_t unused = host_bytes_total_ - host_bytes_used_;
  std::size_t victims = 0;
  if (unused >= bytes) return victims;
  FreedBytes freed(adapter);
  if (replaced != nullptr && !replaced->in_use()) freed.add(*replaced->adapter);
  for (const CacheEntry* idle : host_idle_) {
    if (unused + freed.bytes() >= bytes) return victims;
    if (idle == replaced) continue;
    freed.add(*idle->adapter);
    ++victims;
  }
  const std::size_t free = unused + freed.bytes();
  if (free < bytes) {
    refuse_full(adapter.task_id(), "needs " + std::to_string(bytes) +
                                       " bytes, but requests and pinned adapters keep " +
                                       std::to_string(host_bytes_total_ - free) + " of the host level's " +
                                       std::to_string(host_bytes_total_));
  }
  return victims;
}

std::shared_ptr<std::byte> LoraCache::Impl::allocate_pinned(std::size_t bytes) {
  std::size_t most = 0;
  {
    const std::lock_guard lock(mutex_);
    most = grown_host_bytes(bytes);
  }
  return bytes > most ? nullptr : pages_->allocate_pinned(bytes, most + bytes);
}

std::size_t LoraCache::Impl::grown_host_bytes(std::size_t bytes) const noexcept {
  const std::size_t largest = std::max(largest_bytes_, bytes);
  const std::size_t most = std::min(largest * static_cast<std::size_t>(num_adapters_), max_host_bytes_);
  return std::max({host_bytes_total_, most, std::min(bytes, max_host_bytes_)});
}

void LoraCache::Impl::grow_for(std::size_t bytes, std::int64_t pages) noexcept {
  host_bytes_total_ = grown_host_bytes(bytes);
  largest_bytes_ = std::max(largest_bytes_, bytes);
  largest_pages_ = std::max(largest_pages_, pages);
  free_pages_.grow(std::max(largest_pages_ * num_adapters_, pages));
}

void LoraCache::Impl::insert(const EntryPtr& entry, CacheEntry* replaced, Dropped& dropped) {
  const std::uint64_t task_id = entry->adapter->task_id();
  grow_for(entry->adapter->bytes(), entry->plan.pages);
  const bool pinned = replaced != nullptr && replaced->pinned;
  if (pinned) {
    check_pin(task_id, entry->plan.pages, nullptr, replaced);
  } else {
    check_beside_pinned(task_id, entry->plan.pages, pinned_pages_);
  }
  const std::size_t victims = count_host_victims(*entry->adapter, replaced);

  // Everything that can fail comes before the first change.
  dropped.reserve(victims + 1);
  decltype(entries_) new_entry{{entry->adapter->generation(), entry}};
  decltype(listed_) new_listed{{task_id, entry.get()}};
  CacheEntry::List host_node{entry.get()};
  CacheEntry::List device_node{entry.get()};
  entries_.reserve(entries_.size() + 1);
  listed_.reserve(listed_.size() + 1);

  if (replaced != nullptr) dropped.push_back(retire(*replaced));
  for (std::size_t i = 0; i < victims; ++i) {
    CacheEntry& victim = *host_idle_.front();
    ++counters_.host_evictions;
    if (victim.residence == Residence::kResident) ++counters_.device_evictions;
    dropped.push_back(retire(victim));
  }
  entries_.merge(new_entry);
  listed_.merge(new_listed);
  entry->host_list = &host_busy_;
  entry->host_place = host_node.begin();
  host_busy_.splice(host_busy_.end(), host_node);
  entry->device_list = &device_absent_;
  entry->device_place = device_node.begin();
  device_absent_.splice(device_absent_.end(), device_node);
  count_in(*entry->adapter);
  entry->is_replacement = replaced != nullptr;
  set_pinned(*entry, pinned);
}

void LoraCache::Impl::count_in(const HostAdapter& adapter) noexcept {
  host_bytes_used_ += bytes_to_add(adapter);
  for (const auto& matrix : adapter.matrices()) ++matrix->users;
  unshared_bytes_ += adapter.unshared_bytes();
  saved_products_ += adapter.saved_products();
}

void LoraCache::Impl::count_out(const HostAdapter& adapter) noexcept {
  for (const auto& matrix : adapter.matrices()) --matrix->users;
  host_bytes_used_ -= bytes_to_add(adapter);
  unshared_bytes_ -= adapter.unshared_bytes();
  saved_products_ -= adapter.saved_products();
}

LoraCache::Impl::EntryPtr LoraCache::Impl::retire(CacheEntry& entry) noexcept {
  listed_.erase(entry.adapter->task_id());
  entry.listed = false;
  set_pinned(entry, false);
  return give_up(entry);
}

LoraCache::Impl::EntryPtr LoraCache::Impl::give_up(CacheEntry& entry) noexcept {
  settle(entry);
  return !entry.listed && !entry.in_use() ? erase(entry) : nullptr;
}

LoraCache::Impl::EntryPtr LoraCache::Impl::erase(CacheEntry& entry) noexcept {
  if (entry.residence == Residence::kResident) drop_device_copy(entry);
  count_out(*entry.adapter);
  entry.host_list->erase(entry.host_place);
  entry.device_list->erase(entry.device_place);
  auto node = entries_.extract(entry.adapter->generation());
  return std::move(node.mapped());
}

void LoraCache::Impl::release_user(CacheEntry& entry) noexcept {
  EntryPtr dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  --entry.users;
  dropped = give_up(entry);
}

void LoraCache::Impl::release_lease(CacheEntry& entry) noexcept {
  EntryPtr dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  --entry.leases;
  if (entry.residence == Residence::kFailed && entry.leases == 0) drop_device_copy(entry);
  dropped = give_up(entry);
}

}  // namespace adaptrt
