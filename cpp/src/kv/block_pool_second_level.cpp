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

void BlockPool::record_lost() {
  if (!has_second_level() || events_ == nullptr) return;
  while (const auto hash = second_level_.level->take_lost_event()) events_->record_removed(*hash);
}

std::int32_t BlockPool::onboard(BlockTable& table, const ReuseKey& key, std::span<const std::int32_t> tokens,
                                const std::function<bool(BlockId)>& is_still_read) {
  if (!has_second_level() || tokens.empty() || table.reuse_epoch != reuse_epoch_) return 0;
  SecondLevel& level = *second_level_.level;
  const auto size = static_cast<std::size_t>(tokens_per_block_);
  wanted_.clear();
  auto index = static_cast<std::int32_t>(table.blocks.size());
  ReuseKey key_now = key_for_block(key, index);
  BlockKey before = key_before(key_now, table.blocks.empty() ? kNoBlock : table.blocks.back());
  // The last token is left to compute.
  for (std::size_t first = table.blocks.size() * size; first + size < tokens.size(); first += size, ++index) {
    const auto content = tokens.subspan(first, size);
    if (const ReuseKey block_reuse_key = key_for_block(key, index); block_reuse_key != key_now) {
      key_now = block_reuse_key;
      before = change_key(before, level.fingerprint(), key_now);
    }
    before = block_key(before, content);
    if (!level.contains(before)) break;
    wanted_.push_back({.key = before, .tokens = content});
  }
  if (wanted_.empty()) return 0;

  std::int32_t num_onboarded = 0;
  level.begin_reads(wanted_);
  for (const KeyedBlock& wanted : wanted_) {
    if (num_available() == 0 || is_still_read(next_block())) break;
    const BlockId block = take_block();
    if (!level.read_next(block)) {
      push_free(block);
      break;
    }
    blocks_[block].num_users = 1;
    const BlockId parent = table.blocks.empty() ? kNoBlock : table.blocks.back();
    insert_in_index(block, key_for_block(key, static_cast<std::int32_t>(table.blocks.size())), parent,
                    wanted.tokens);
    table.blocks.push_back(block);
    ++num_onboarded;
  }
  level.end_reads();
  record_lost();
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
  level.await_writes(deadline);
}

}  // namespace adaptrt
