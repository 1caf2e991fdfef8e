// Blocks that are offloaded to the second level or onboarded from it.

#include <algorithm>
#include <bit>

#include "adaptrt/kv/block_pool.h"

namespace adaptrt {

BlockKey BlockPool::compute_key(BlockId block) const {
  const Block& entry = blocks_[block];
  return block_key(key_before(entry.key, entry.parent_block), tokens_in(block));
}

BlockKey BlockPool::key_before(const ReuseKey& key, BlockId parent) const {
  const Sha256Digest& fingerprint = second_level_.level->fingerprint();
  if (parent == kNoBlock) return root_key(fingerprint, key);
  return blocks_[parent].key == key ? keys_[parent] : change_key(keys_[parent], fingerprint, key);
}

bool BlockPool::offload(BlockId block) {
  if (!has_second_level() || blocks_[block].retention.priority < second_level_.min_priority) return false;
  const auto event_hash = events_ != nullptr ? std::optional(blocks_[block].hash) : std::nullopt;
  return second_level_.level->offload(block, {.key = keys_[block], .tokens = tokens_in(block)}, event_hash);
}

bool BlockPool::has_snapshot_to_offload(BlockId block) const {
  return second_level_.states != nullptr && states_->snapshot_after(block) != kNoStateSlot &&
         blocks_[block].retention.priority >= second_level_.min_priority;
}

void BlockPool::offload_snapshot(BlockId block) {
  if (!has_snapshot_to_offload(block)) return;
  static_cast<void>(second_level_.states->offload(
      states_->place_of_snapshot(block), {.key = keys_[block], .tokens = tokens_in(block)}, std::nullopt));
}

void BlockPool::record_lost() {
  if (!has_second_level() || events_ == nullptr) return;
  while (const auto hash = second_level_.level->take_lost_event()) events_->record_removed(*hash);
}

std::size_t BlockPool::find_wanted(const BlockTable& table, const ReuseKey& key,
                                   std::span<const std::int32_t> tokens) {
  SecondLevel& level = *second_level_.level;
  const auto size = static_cast<std::size_t>(tokens_per_block_);
  wanted_.clear();
  auto index = static_cast<std::int32_t>(table.blocks.size());
  const BlockId last = table.blocks.empty() ? kNoBlock : table.blocks.back();
  ReuseKey key_now = key_for_block(key, index);
  BlockKey before = key_before(key_now, last);
  ContentId parent = last == kNoBlock ? 0 : blocks_[last].content;
  bool is_in_pool = second_level_.states != nullptr;
  std::size_t num_in_pool = 0;
  std::size_t num_with_states = 0;
  // The last token is left to compute.
  for (std::size_t first = table.blocks.size() * size; first + size < tokens.size(); first += size, ++index) {
    const auto content = tokens.subspan(first, size);
    if (const ReuseKey block_reuse_key = key_for_block(key, index); block_reuse_key != key_now) {
      key_now = block_reuse_key;
      before = change_key(before, level.fingerprint(), key_now);
    }
    before = block_key(before, content);
    const BlockId block = is_in_pool ? find(key_now, parent, content) : kNoBlock;
    is_in_pool = block != kNoBlock;
    if (is_in_pool) {
      ++num_in_pool;
      parent = blocks_[block].content;
    } else if (!level.contains(before)) {
      break;
    }
    wanted_.push_back({.key = before, .tokens = content});
    if (second_level_.states != nullptr && second_level_.states->contains(before)) {
      num_with_states = wanted_.size();
    }
  }
  if (second_level_.states != nullptr) wanted_.resize(num_with_states);
  return std::min(num_in_pool, wanted_.size());
}

void BlockPool::take_wanted(BlockTable& table, const ReuseKey& key, std::size_t num_in_pool,
                            const std::function<bool(BlockId)>& is_still_read) {
  SecondLevel& level = *second_level_.level;
  const auto key_of_next = [&] { return key_for_block(key, static_cast<std::int32_t>(table.blocks.size())); };
  const std::span<const KeyedBlock> wanted(wanted_);
  for (const KeyedBlock& known : wanted.first(num_in_pool)) {
    const ContentId parent = table.blocks.empty() ? 0 : blocks_[table.blocks.back()].content;
    const BlockId block = find(key_of_next(), parent, known.tokens);
    add_user(block);
    table.blocks.push_back(block);
  }
  level.begin_reads(wanted.subspan(num_in_pool));
  for (const KeyedBlock& missing : wanted.subspan(num_in_pool)) {
    if (num_available() == 0 || is_still_read(next_block())) break;
    const BlockId block = take_block();
    if (!level.read_next(block)) {
      push_free(block);
      break;
    }
    blocks_[block].num_users = 1;
    const BlockId parent = table.blocks.empty() ? kNoBlock : table.blocks.back();
    insert_in_index(block, key_of_next(), parent, missing.tokens);
    table.blocks.push_back(block);
  }
  level.end_reads();
  record_lost();
}

StateSlot BlockPool::read_snapshot() {
  const StateSlot slot = states_->begin_snapshot();
  if (slot == kNoStateSlot) return slot;
  SecondLevel& level = *second_level_.states;
  level.begin_reads(std::span(wanted_).last(1));
  const bool was_read = level.read_next(slot);
  level.end_reads();
  if (was_read) return slot;
  states_->cancel_snapshot(slot);
  return kNoStateSlot;
}

std::int32_t BlockPool::onboard(BlockTable& table, const ReuseKey& key, std::span<const std::int32_t> tokens,
                                const std::function<bool(BlockId)>& is_still_read) {
  if (!has_second_level() || tokens.empty() || table.reuse_epoch != reuse_epoch_) return 0;
  const std::size_t num_in_pool = find_wanted(table, key, tokens);
  if (wanted_.empty()) return 0;
  const bool has_states = second_level_.states != nullptr;
  const StateSlot snapshot = has_states ? read_snapshot() : kNoStateSlot;
  if (has_states && snapshot == kNoStateSlot) return 0;
  const std::size_t num_before = table.blocks.size();
  take_wanted(table, key, num_in_pool, is_still_read);
  if (has_states && table.blocks.size() < num_before + wanted_.size()) {
    // Without the states after the last one, these blocks cannot be used; later sequences may find them.
    while (table.blocks.size() > num_before) {
      drop_user(table.blocks.back());
      table.blocks.pop_back();
    }
    states_->cancel_snapshot(snapshot);
    return 0;
  }
  if (has_states) states_->end_snapshot(snapshot, table.blocks.back());
  const auto num_onboarded = static_cast<std::int32_t>(table.blocks.size() - num_before);
  // reuse_prefix() has counted them as missed.
  table.num_indexed += num_onboarded;
  table.reused_blocks += num_onboarded;
  table.missed_blocks -= num_onboarded;
  reused_blocks_ += num_onboarded;
  missed_blocks_ -= num_onboarded;
  reused_tokens_ += std::int64_t{num_onboarded} * tokens_per_block_;
  return num_onboarded * tokens_per_block_;
}

void BlockPool::offload_all(Time deadline) {
  if (!has_second_level()) return;
  std::vector<BlockId> order;
  for (BlockId block = 0; block < num_blocks_; ++block) {
    if (blocks_[block].num_users > 0 && blocks_[block].content != 0) order.push_back(block);
  }
  std::ranges::sort(order, {}, [&](BlockId block) { return blocks_[block].content; });
  for (auto list = cached_.rbegin(); list != cached_.rend(); ++list) {
    for (BlockId block = list->newest; block != kNoBlock; block = blocks_[block].previous) {
      order.push_back(block);
    }
  }
  SecondLevel& level = *second_level_.level;
  // At most as many as it can hold; otherwise the last ones would replace the first.
  order.resize(std::min(order.size(), static_cast<std::size_t>(level.stats().max_num_blocks)));
  level.begin_closing(static_cast<std::int64_t>(order.size()));
  for (const BlockId block : order) {
    if (!level.await_room(deadline)) break;
    static_cast<void>(offload(block));
  }
  if (second_level_.states != nullptr) offload_snapshots(order, deadline);
  level.await_writes(deadline);
}

void BlockPool::offload_snapshots(std::vector<BlockId>& order, Time deadline) {
  SecondLevel& level = *second_level_.states;
  std::erase_if(order, [&](BlockId block) { return !has_snapshot_to_offload(block); });
  order.resize(std::min(order.size(), static_cast<std::size_t>(level.stats().max_num_blocks)));
  level.begin_closing(static_cast<std::int64_t>(order.size()));
  for (const BlockId block : order) {
    if (!level.await_room(deadline)) break;
    offload_snapshot(block);
  }
  level.await_writes(deadline);
}

}  // namespace adaptrt
