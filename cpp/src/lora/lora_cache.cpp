#include "adaptrt/lora/lora_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "adapter_bounds.h"
#include "adaptrt/core/error.h"
#include "lora_cache_impl.h"

namespace adaptrt {

std::string task_text(std::uint64_t task_id) {
  return "LoRA task " + std::to_string(task_id);
}

void refuse_full(std::uint64_t task_id, const std::string& reason) {
  throw LoraCacheFullError("PEFT Cache is full. Could not store taskId=" + std::to_string(task_id) + ": " +
                           reason);
}

LoraCache::Impl::Impl(LoraLayout layout, std::unique_ptr<AdapterPages> pages, LoraCacheOptions options)
    : layout_(std::move(layout)),
      sites_(layout_),
      max_host_bytes_(std::max(options.host_bytes, options.max_host_bytes)),
      num_adapters_(options.num_adapters),
      pages_(std::move(pages)),
      packs_adapters_(layout_.is_whole() && !pages_->shares_adapters()),
      refers_to_host_(packs_adapters_ && pages_->is_host_memory()),
      matrices_(refers_to_host_ ? std::make_shared<SharedMatrices>() : nullptr),
      storage_(options.storage),
      has_workers_(options.num_load_workers > 0),
      num_admit_threads_(options.num_admit_threads),
      on_load_end_(std::move(options.on_load_end)),
      free_pages_(options.device_pages > 0 ? options.device_pages : pages_->num_pages(), pages_->num_pages()),
      host_bytes_total_(options.host_bytes) {
  Problems problems = check_lora_storage(storage_, layout_);
  if (problems.empty() && storage_ != LoraStorage::kExact && packs_adapters_ && !refers_to_host_) {
    problems.add("lora_storage is '" + std::string(name_of(storage_)) +
                 "'; expected 'exact': the device level does not refer to the host level");
  }
  const std::size_t page_bytes = pages_->page_bytes();
  const std::size_t largest = largest_image_bytes(layout_, layout_.max_rank);
  if (page_bytes < largest) {
    problems.add("page_bytes is " + std::to_string(page_bytes) +
                 ", but one linear layer's share of an adapter "
                 "of rank " +
                 std::to_string(layout_.max_rank) + " needs " + std::to_string(largest));
  }
  if (page_bytes % kImageAlignment != 0) {
    problems.add("page_bytes is " + std::to_string(page_bytes) + "; accepted: multiples of " +
                 std::to_string(kImageAlignment));
  }
  problems.throw_if_any<ConfigError>("LoRA cache");
}

void LoraCache::Impl::unload(std::uint64_t task_id) {
  EntryPtr dropped;
  const std::lock_guard lock(mutex_);
  dropped = retire(require_listed(task_id));
}

void LoraCache::Impl::withdraw(std::uint64_t generation, std::int64_t admissions) noexcept {
  EntryPtr dropped;
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(generation);
  if (found == entries_.end()) return;
  CacheEntry& entry = *found->second;
  if (!entry.listed || entry.pinned || entry.is_replacement || entry.admissions != admissions) return;
  dropped = retire(entry);
}

bool LoraCache::Impl::contains(std::uint64_t task_id) const {
  const std::lock_guard lock(mutex_);
  return find_listed(task_id) != nullptr;
}

std::vector<LoraCacheEntry> LoraCache::Impl::list() const {
  std::vector<LoraCacheEntry> result;
  {
    const std::lock_guard lock(mutex_);
    result.reserve(listed_.size());
    for (const auto& [task_id, entry] : listed_) {
      result.push_back({task_id, entry->adapter->bytes(), entry->plan.pages,
                        entry->residence == Residence::kResident, entry->pinned, entry->users,
                        entry->outdated});
    }
  }
  std::ranges::sort(result, {}, &LoraCacheEntry::task_id);
  return result;
}

LoraCacheStats LoraCache::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  LoraCacheStats stats = counters_;
  stats.host_adapters = static_cast<std::int64_t>(entries_.size());
  stats.device_adapters =
      static_cast<std::int64_t>(device_busy_.size() + device_idle_.size()) - loads_in_flight_;
  stats.loads_in_flight = loads_in_flight_;
  stats.host_bytes_used = host_bytes_used_;
  stats.host_bytes_total = host_bytes_total_;
  stats.page_bytes = pages_->page_bytes();
  stats.device_pages_used = free_pages_.total() - free_pages_.count();
  stats.device_pages_total = free_pages_.total();
  stats.saved_bytes = unshared_bytes_ - host_bytes_used_;
  stats.saved_products = saved_products_;
  stats.memory_bytes = host_bytes_used_;
  stats.pinned_bytes = pages_->pinned_bytes();
  if (!refers_to_host_) {
    stats.memory_bytes += static_cast<std::size_t>(stats.device_pages_total) * pages_->page_bytes();
  }
  return stats;
}

void LoraCache::Impl::count_waiting_step() {
  const std::lock_guard lock(mutex_);
  ++counters_.steps_waiting_for_adapters;
}

CacheEntry* LoraCache::Impl::find_listed(std::uint64_t task_id) const {
  const auto found = listed_.find(task_id);
  return found == listed_.end() ? nullptr : found->second;
}

CacheEntry& LoraCache::Impl::require_listed(std::uint64_t task_id) const {
  CacheEntry* entry = find_listed(task_id);
  if (entry == nullptr) throw PeftTaskNotCachedError(task_text(task_id) + " not found in cache");
  return *entry;
}

CacheEntry& LoraCache::Impl::require_known(const HostAdapter& adapter) const {
  const auto found = entries_.find(adapter.generation());
  if (found == entries_.end()) {
    throw AdapterError(task_text(adapter.task_id()) + ": the adapter was not admitted by this LoRA cache");
  }
  return *found->second;
}

LoraCache::LoraCache(LoraLayout layout, std::unique_ptr<AdapterPages> pages, LoraCacheOptions options)
    : impl_(std::make_shared<Impl>(std::move(layout), std::move(pages), options)) {
  for (std::int32_t i = 0; i < options.num_load_workers; ++i) {
    workers_.emplace_back([impl = impl_.get()](const std::stop_token& stop) { impl->make_loads(stop); });
  }
}

LoraCache::~LoraCache() {
  for (std::jthread& worker : workers_) worker.request_stop();
}

std::shared_ptr<const HostAdapter> LoraCache::admit(const LoraConfig& config) {
  return impl_->admit(config);
}
std::optional<DeviceLease> LoraCache::acquire(const std::shared_ptr<const HostAdapter>& adapter) {
  return impl_->acquire(*adapter);
}
AdapterReadiness LoraCache::ensure(const HostAdapter& adapter, std::uint64_t turn, bool may_load) {
  return impl_->ensure(adapter, turn, may_load);
}
void LoraCache::expect(const HostAdapter& adapter) {
  impl_->expect(adapter);
}
std::vector<LoadFailure> LoraCache::take_load_failures() {
  return impl_->take_load_failures();
}
std::int64_t LoraCache::obtainable_pages() const {
  return impl_->obtainable_pages();
}
std::int64_t LoraCache::pages_needed(const HostAdapter& adapter) const {
  return impl_->pages_needed(adapter);
}
bool LoraCache::is_leased(const HostAdapter& adapter) const {
  return impl_->is_leased(adapter);
}
void LoraCache::pin(std::uint64_t task_id) {
  impl_->pin(task_id);
}
void LoraCache::unpin(std::uint64_t task_id) {
  impl_->unpin(task_id);
}
void LoraCache::unload(std::uint64_t task_id) {
  impl_->unload(task_id);
}
void LoraCache::set_outdated(std::uint64_t task_id, bool outdated) noexcept {
  impl_->set_outdated(task_id, outdated);
}
void LoraCache::withdraw(std::uint64_t generation, std::int64_t admissions) noexcept {
  impl_->withdraw(generation, admissions);
}
std::optional<AdapterTerms> LoraCache::terms_of(const LoraConfig& config) const {
  return impl_->terms_of(config);
}

bool LoraCache::contains(std::uint64_t task_id) const {
  return impl_->contains(task_id);
}
std::vector<LoraCacheEntry> LoraCache::list() const {
  return impl_->list();
}
LoraCacheStats LoraCache::stats() const {
  return impl_->stats();
}
void LoraCache::count_waiting_step() {
  impl_->count_waiting_step();
}
const LoraLayout& LoraCache::layout() const {
  return impl_->layout();
}
std::vector<std::string> LoraCache::check_invariants() const {
  return impl_->check_invariants();
}

DeviceLease::DeviceLease(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceLease::DeviceLease(DeviceLease&&) noexcept = default;
DeviceLease& DeviceLease::operator=(DeviceLease&&) noexcept = default;
DeviceLease::~DeviceLease() = default;
const DeviceAdapter& DeviceLease::adapter() const {
  return impl_->adapter();
}

}  // namespace adaptrt
