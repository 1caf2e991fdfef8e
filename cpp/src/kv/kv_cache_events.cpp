#include "adaptrt/kv/kv_cache_events.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace adaptrt {

std::vector<KVCacheEvent> KVCacheEventManager::get_latest_events(Timeout timeout) {
  std::unique_lock lock(mutex_);
  const auto is_over = [this] { return !events_.empty() || is_closed_; };
  if (timeout) {
    changed_.wait_for(lock, *timeout, is_over);
  } else {
    changed_.wait(lock, is_over);
  }
  std::vector<KVCacheEvent> latest(std::make_move_iterator(events_.begin()),
                                   std::make_move_iterator(events_.end()));
  events_.clear();
  return latest;
}

bool KVCacheEventManager::is_closed() const {
  const std::lock_guard lock(mutex_);
  return is_closed_;
}

void KVCacheEventManager::record_created(std::vector<std::int64_t> num_blocks_per_cache_level) {
  record(KVCacheCreatedData{std::move(num_blocks_per_cache_level)});
}

void KVCacheEventManager::record_stored(std::optional<std::uint64_t> parent_hash,
                                        KVCacheStoredBlockData block) {
  KVCacheStoredData* const newest = newest_stored();
  if (newest != nullptr && newest->blocks.back().block_hash == parent_hash) {
    newest->blocks.push_back(std::move(block));
    return;
  }
  KVCacheStoredData data{parent_hash, {}};
  data.blocks.push_back(std::move(block));
  record(std::move(data));
}

void KVCacheEventManager::record_removed(std::uint64_t block_hash) {
  auto* const newest = pending_.empty() ? nullptr : std::get_if<KVCacheRemovedData>(&pending_.back().data);
  if (newest != nullptr) {
    newest->block_hashes.push_back(block_hash);
  } else {
    record(KVCacheRemovedData{{block_hash}});
  }
}

void KVCacheEventManager::record_priority(std::uint64_t block_hash, std::int32_t old_value,
                                          std::int32_t new_value) {
  if (KVCacheStoredData* const newest = newest_stored()) {
    const auto block = std::ranges::find(newest->blocks, block_hash, &KVCacheStoredBlockData::block_hash);
    if (block != newest->blocks.end()) {
      block->priority = new_value;
      return;
    }
  }
  record(KVCacheUpdatedData{block_hash, std::nullopt, KVCacheEventDiffInt{old_value, new_value}});
}

void KVCacheEventManager::record_level(std::uint64_t block_hash, std::int32_t old_value,
                                       std::int32_t new_value) {
  record(KVCacheUpdatedData{block_hash, KVCacheEventDiffInt{old_value, new_value}, std::nullopt});
}

KVCacheStoredData* KVCacheEventManager::newest_stored() {
  return pending_.empty() ? nullptr : std::get_if<KVCacheStoredData>(&pending_.back().data);
}

void KVCacheEventManager::record(KVCacheEventData data) {
  pending_.push_back({next_id_++, std::move(data), window_size_, std::nullopt});
}

void KVCacheEventManager::flush() {
  if (pending_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t num_new = std::min(pending_.size(), max_size_);
    while (events_.size() > max_size_ - num_new) events_.pop_front();
    events_.insert(events_.end(),
                   std::make_move_iterator(pending_.end() - static_cast<std::ptrdiff_t>(num_new)),
                   std::make_move_iterator(pending_.end()));
  }
  pending_.clear();
  changed_.notify_all();
}

void KVCacheEventManager::close() {
  try {
    flush();
  } catch (const std::bad_alloc&) {  // waiting threads are still told of the end
    pending_.clear();
  }
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
}

}  // namespace adaptrt
