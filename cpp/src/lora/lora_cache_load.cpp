// Loads from the host level to the device level, and the threads that run them.

#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "lora_cache_impl.h"

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

}  // namespace

std::exception_ptr LoraCache::Impl::load(CacheEntry& entry, std::unique_lock<std::mutex>& lock) noexcept {
  lock.unlock();
  const auto start = std::chrono::steady_clock::now();
  DeviceAdapter packed;
  std::exception_ptr error;
  try {
    std::vector<std::byte*> addresses;
    for (const std::int64_t page : entry.pages) addresses.push_back(pages_->address(page));
    pages_->load(entry.pages, [&](std::span<std::byte* const> host_pages) {
      packed = pack_adapter(*entry.adapter, layout_, entry.plan, host_pages, addresses);
    });
    pages_->share(entry.adapter, entry.pages, packed.load_id);
  } catch (...) {
    error = std::current_exception();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  lock.lock();
  --loads_in_flight_;
  counters_.load_seconds += elapsed.count();
  if (error) {
    ++counters_.failed_loads;
    entry.newest_load->error = error;
    drop_device_copy(entry);
  } else {
    entry.device = std::move(packed);
    entry.residence = Residence::kResident;
    entry.is_fresh = true;
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
