// Chooses the cached block to evict when no block is free.

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "adaptrt/kv/block_pool.h"

namespace adaptrt {

void BlockPool::set_retention(const BlockTable& table, std::int32_t index, const BlockRetention& retention) {
  if (index < 0 || index >= table.num_indexed) throw std::logic_error("set_retention: not an indexed block");
  update_retention(table.blocks[index], retention);
}

void BlockPool::change_retention(BlockId block, const BlockRetention& retention) {
  BlockRetention& own = blocks_[block].retention;
  num_special_ += static_cast<int>(retention.priority != kDefaultRetentionPriority) -
                  static_cast<int>(own.priority != kDefaultRetentionPriority);
  own = retention;
}

void BlockPool::update_retention(BlockId block, const BlockRetention& retention) {
  const std::int32_t before = blocks_[block].retention.priority;
  change_retention(block, retention);
  if (events_ != nullptr && retention.priority != before) {
    events_->record_priority(blocks_[block].hash, before, retention.priority);
  }
}

void BlockPool::set_time(Time now) {
  now_ = std::max(now_, now);
  for (SecondLevel* level : {second_level_.level, second_level_.states}) {
    if (level != nullptr) level->begin_step();
  }
  record_lost();
  while (!expiring_.empty() && expiring_.begin()->first <= now_) {
    const BlockId block = expiring_.begin()->second;
    expiring_.erase(expiring_.begin());
    update_retention(block, {});
    if (compute_level(block) != blocks_[block].level) move_in_cached(block);
  }
}

BlockId BlockPool::least_wanted() const {
  const int word = used_levels_[0] != 0 ? 0 : 1;
  return cached_[static_cast<std::size_t>(word * 64 + std::countr_zero(used_levels_[word]))].oldest;
}

void BlockPool::evict(BlockId block) {
  const BlockId parent = blocks_[block].parent_block;
  const bool is_offloaded = offload(block);
  offload_snapshot(block);
  unlink_from_cached(block);
  remove_from_index(block, is_offloaded);
  record_lost();
  // The evicted block may have determined the level of the block before it.
  if (parent == kNoBlock || blocks_[parent].num_users > 0) return;
  if (compute_level(parent) != blocks_[parent].level) move_in_cached(parent);
}

std::int32_t BlockPool::compute_level(BlockId block) const {
  if (num_special_ == 0) return kDefaultRetentionPriority;
  std::int32_t level = blocks_[block].retention.priority;
  for (BlockId child = blocks_[block].first_child; child != kNoBlock; child = blocks_[child].next_sibling) {
    level = std::max(level, blocks_[child].level);
  }
  return level;
}

void BlockPool::move_in_cached(BlockId block) {
  std::int32_t last_level = -1;  // of the block that was moved last
  for (; block != kNoBlock && blocks_[block].num_users == 0; block = blocks_[block].parent_block) {
    const std::int32_t level = compute_level(block);
    // If two blocks have the same level, the parent must be the more recently used one.
    if (last_level >= 0 && level == blocks_[block].level && level != last_level) return;
    unlink(block);
    append(block);
    last_level = level;
  }
}

void BlockPool::append_to_cached(BlockId block) {
  append(block);
  ++num_cached_;
  Block& entry = blocks_[block];
  if (!entry.retention.duration) return;
  entry.expiry = now_ + *entry.retention.duration;
  expiring_.emplace(entry.expiry, block);
}

void BlockPool::unlink_from_cached(BlockId block) {
  unlink(block);
  --num_cached_;
  if (blocks_[block].retention.duration) expiring_.erase({blocks_[block].expiry, block});
}

void BlockPool::append(BlockId block) {
  Block& entry = blocks_[block];
  entry.level = compute_level(block);
  CachedList& list = cached_[static_cast<std::size_t>(entry.level)];
  entry.previous = list.newest;
  entry.next = kNoBlock;
  (list.newest == kNoBlock ? list.oldest : blocks_[list.newest].next) = block;
  list.newest = block;
  used_levels_[static_cast<std::size_t>(entry.level / 64)] |= std::uint64_t{1} << (entry.level % 64);
}

void BlockPool::unlink(BlockId block) {
  Block& entry = blocks_[block];
  CachedList& list = cached_[static_cast<std::size_t>(entry.level)];
  (entry.previous == kNoBlock ? list.oldest : blocks_[entry.previous].next) = entry.next;
  (entry.next == kNoBlock ? list.newest : blocks_[entry.next].previous) = entry.previous;
  entry.previous = kNoBlock;
  entry.next = kNoBlock;
  if (list.oldest == kNoBlock) {
    used_levels_[static_cast<std::size_t>(entry.level / 64)] &= ~(std::uint64_t{1} << (entry.level % 64));
  }
}

}  // namespace adaptrt
