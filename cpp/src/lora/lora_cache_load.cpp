// Loads from the host level to the device level, and the threads that run them.

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lora_cache_impl.h"
#include "rows_of_sites.h"

namespace adaptrt {
namespace {

/// Returns the text of an exception, or no text if reading it would throw again.
void describe(const std::exception_ptr& error, std::string& text) noexcept {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      text = known.what();
    } catch (...) {
      text = "unknown error";
    }
  } catch (...) {
    text.clear();
  }
}

/// Returns the ranges of a packed adapter's images, each of one layer, in the order in which a step reads
/// them.
std::vector<AdapterPages::Copy> ranges_of(const HostAdapter& adapter, const LoraLayout& layout,
                                          std::span<const std::int64_t> pages) {
  const DevicePlan& plan = adapter.plan();
  std::vector<const DevicePlan::Site*> sites;
  for (const DevicePlan::Site& site : plan.sites) sites.push_back(&site);
  const auto position = [&](const DevicePlan::Site* site) { return load_position(layout, site->site); };
  std::ranges::sort(sites, {}, position);
  std::vector<AdapterPages::Copy> ranges;
  std::int32_t layer_of_last = 0;
  for (const DevicePlan::Site* entry : sites) {
    const LoraSite& site = layout.sites[static_cast<std::size_t>(entry->site)];
    const std::size_t bytes = image_bytes(layout, site, modules_of(adapter.rows(), entry->rows));
    const std::byte* image =
        adapter.packed_page(static_cast<std::size_t>(entry->place.page)) + entry->place.offset;
    const std::int64_t page = pages[static_cast<std::size_t>(entry->place.page)];
    const std::int32_t layer = site.is_of_layer() ? site.layer : layer_of_last;
    if (!ranges.empty() && layer == layer_of_last && ranges.back().page == page &&
        ranges.back().from.data() + ranges.back().from.size() == image) {
      ranges.back().from = {ranges.back().from.data(), ranges.back().from.size() + bytes};
    } else {
      ranges.push_back({page, entry->place.offset, {image, bytes}, position(entry)});
    }
    layer_of_last = layer;
  }
  return ranges;
}

}  // namespace

DeviceAdapter LoraCache::Impl::pack(const CacheEntry& entry, std::span<std::byte* const> addresses) {
  AdapterPacker packer(*entry.adapter, layout_, entry.plan, addresses);
  pages_->load(entry.pages,
               [&](std::size_t page, std::byte* host_page) { return packer.write_page(page, host_page); });
  return packer.take();
}

void LoraCache::Impl::announce(CacheEntry& entry, DeviceAdapter adapter) noexcept {
  {
    const std::lock_guard lock(mutex_);
    entry.device = std::move(adapter);
    entry.residence = Residence::kArriving;
    entry.is_fresh = true;
  }
  if (on_load_end_) on_load_end_();
}

std::exception_ptr LoraCache::Impl::load(CacheEntry& entry, std::unique_lock<std::mutex>& lock) noexcept {
  lock.unlock();
  const auto start = std::chrono::steady_clock::now();
  DeviceAdapter packed;
  std::exception_ptr error;
  try {
    std::vector<std::byte*> addresses;
    for (const std::int64_t page : entry.pages) addresses.push_back(pages_->address(page));
    if (entry.adapter->is_pinned()) {
      packed = device_adapter_on_pages(*entry.adapter, layout_, addresses);
      const auto copies =
          pages_->begin_copies(packed.load_id, ranges_of(*entry.adapter, layout_, entry.pages));
      // Without workers, the order of events must not depend on timing.
      if (has_workers_) announce(entry, std::exchange(packed, {}));
      copies->wait();
    } else {
      packed = pack(entry, addresses);
    }
    pages_->share(entry.adapter, entry.pages, packed.load_id);
  } catch (...) {
    error = std::current_exception();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  lock.lock();
  --loads_in_flight_;
  counters_.load_seconds += elapsed.count();
  if (packs_adapters_ && !entry.adapter->is_pinned()) ++counters_.staged_loads;
  if (error) {
    ++counters_.failed_loads;
    entry.newest_load->error = error;
    if (entry.leases > 0) {
      entry.residence = Residence::kFailed;
    } else {
      drop_device_copy(entry);
    }
  } else {
    if (entry.residence == Residence::kLoading) {
      entry.device = std::move(packed);
      entry.is_fresh = true;
    }
    entry.residence = Residence::kResident;
  }
  entry.newest_load->has_ended = true;
  settle(entry);
  loaded_.notify_all();
  return error;
}

void LoraCache::Impl::make_loads(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (has_work_.wait(lock, stop, [&] { return !queued_loads_.empty(); }) && !stop.stop_requested()) {
    LoadJobs job;
    job.splice(job.begin(), queued_loads_, queued_loads_.begin());
    make_load(job, lock);
    lock.unlock();
    if (on_load_end_) on_load_end_();
    lock.lock();
  }
}

void LoraCache::Impl::make_load(LoadJobs& job, std::unique_lock<std::mutex>& lock) noexcept {
  CacheEntry& entry = *job.front().entry;
  EntryPtr dropped;
  if (!entry.listed && !entry.is_held()) {  // no request can use it any more
    --loads_in_flight_;
    drop_device_copy(entry);
  } else if (const auto error = load(entry, lock)) {
    describe(error, job.front().failure.reason);
    failed_loads_.splice(failed_loads_.end(), job);
  }
  dropped = give_up(entry);
  lock.unlock();
  dropped.reset();
  lock.lock();
}

std::vector<LoadFailure> LoraCache::Impl::take_load_failures() {
  LoadJobs failed;
  {
    const std::lock_guard lock(mutex_);
    failed.swap(failed_loads_);
  }
  std::vector<LoadFailure> failures;
  for (LoadJob& job : failed) failures.push_back(std::move(job.failure));
  return failures;
}

}  // namespace adaptrt
