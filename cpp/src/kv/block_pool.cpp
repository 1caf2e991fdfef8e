#include "adaptrt/kv/block_pool.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "adaptrt/core/error.h"
#include "mix.h"

namespace adaptrt {

namespace {

/// Returns the first eight bytes, which are 0 if there is no digest.
std::uint64_t first_bytes(const Sha256Digest& digest) {
  std::uint64_t value = 0;
  std::memcpy(&value, digest.data(), sizeof(value));
  return value;
}

}  // namespace

BlockPool::BlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block, bool enable_block_reuse,
                     KVCacheEventManager* events, PartialReuse partial_reuse,
                     const SecondLevelOptions& second_level, StatePool* states)
    : num_blocks_(num_blocks),
      tokens_per_block_(tokens_per_block),
      enable_block_reuse_(enable_block_reuse),
      events_(events),
      // There are no states within a block.
      partial_reuse_(enable_block_reuse && states == nullptr ? partial_reuse : PartialReuse::kNone),
      second_level_(enable_block_reuse ? second_level : SecondLevelOptions{}),
      states_(states) {
  Problems problems;
  if (num_blocks < 0)
    problems.add("the number of KV blocks is " + std::to_string(num_blocks) + "; it must be 0 or more");
  if (tokens_per_block < 1) {
    problems.add("tokens_per_block is " + std::to_string(tokens_per_block) + "; it must be positive");
  }
  if (has_second_level() && (states_ != nullptr) != (second_level_.states != nullptr)) {
    problems.add("a second level needs one of snapshots, if there are states");
  }
  problems.throw_if_any<ConfigError>("BlockPool");
  blocks_.resize(num_blocks);
  if (enable_block_reuse) {
    indexed_tokens_.resize(static_cast<std::size_t>(num_blocks) * tokens_per_block);
    buckets_.resize(std::bit_ceil(static_cast<std::size_t>(num_blocks)), kNoBlock);
  }
  if (has_second_level()) keys_.resize(static_cast<std::size_t>(num_blocks));
  if (second_level_.states != nullptr) {
    states_->before_replacement([this](BlockId block) { offload_snapshot(block); });
  }
  if (partial_reuse_ != PartialReuse::kNone) by_beginning_.reserve(static_cast<std::size_t>(num_blocks));
  // In reverse order, so that the lowest ids are used first.
  for (BlockId block = num_blocks - 1; block >= 0; --block) push_free(block);
  if (events_ != nullptr) {
    events_->record_created(
        {num_blocks, has_second_level() ? second_level_.level->stats().max_num_blocks : 0});
  }
}

BlockPool::PrefixMatch BlockPool::match_prefix(const ReuseKey& key,
                                               std::span<const std::int32_t> tokens) const {
  PrefixMatch match;
  if (!enable_block_reuse_ || tokens.empty()) return match;
  const auto longest = static_cast<std::int32_t>((tokens.size() - 1) / tokens_per_block_);
  ContentId parent = 0;
  std::int32_t num_unused_blocks = 0;
  for (std::int32_t i = 0; i < longest; ++i) {
    const BlockId block =
        find(key_for_block(key, i), parent,
             tokens.subspan(static_cast<std::size_t>(i) * tokens_per_block_, tokens_per_block_));
    if (block == kNoBlock) break;
    ++match.num_blocks_with_kv;
    if (blocks_[block].num_users == 0) ++num_unused_blocks;
    parent = blocks_[block].content;
    if (states_ != nullptr && states_->snapshot_after(block) == kNoStateSlot) continue;
    match.num_blocks = match.num_blocks_with_kv;
    match.num_unused_blocks = num_unused_blocks;
  }
  if (states_ != nullptr) return match;
  const auto rest = tokens.subspan(static_cast<std::size_t>(match.num_blocks) * tokens_per_block_);
  match.num_partial_tokens =
      find_beginning(match, key_for_block(key, match.num_blocks), parent, rest).num_tokens;
  return match;
}

std::int32_t BlockPool::reuse_prefix(BlockTable& table, const ReuseKey& key,
                                     std::span<const std::int32_t> tokens) {
  if (!table.blocks.empty()) throw std::logic_error("reuse_prefix: the block table is not empty");
  if (!enable_block_reuse_ || tokens.empty()) return 0;
  table.reuse_epoch = reuse_epoch_;
  const auto longest = static_cast<std::int32_t>((tokens.size() - 1) / tokens_per_block_);
  const std::int32_t most = states_ != nullptr ? match_prefix(key, tokens).num_blocks : longest;
  ContentId parent = 0;
  for (std::int32_t i = 0; i < most; ++i) {
    const BlockId block =
        find(key_for_block(key, i), parent,
             tokens.subspan(static_cast<std::size_t>(i) * tokens_per_block_, tokens_per_block_));
    if (block == kNoBlock) break;
    add_user(block);
    table.blocks.push_back(block);
    parent = blocks_[block].content;
  }
  table.num_indexed = static_cast<std::int32_t>(table.blocks.size());
  table.reused_blocks += table.num_indexed;
  table.missed_blocks += longest - table.num_indexed;
  reused_blocks_ += table.num_indexed;
  missed_blocks_ += longest - table.num_indexed;
  reused_tokens_ += std::int64_t{table.num_indexed} * tokens_per_block_;
  return table.num_indexed * tokens_per_block_;
}

bool BlockPool::try_grow(BlockTable& table, std::int32_t num_tokens) {
  const auto have = static_cast<std::int32_t>(table.blocks.size());
  const std::int32_t missing = blocks_for(num_tokens) - have;
  if (missing <= 0) return true;
  if (missing > num_available()) return false;
  if (have == 0) table.reuse_epoch = reuse_epoch_;
  for (std::int32_t i = 0; i < missing; ++i) {
    const BlockId block = take_block();
    blocks_[block].num_users = 1;
    table.blocks.push_back(block);
  }
  table.alloc_new_blocks += missing;
  alloc_new_blocks_ += missing;
  return true;
}

bool BlockPool::try_fork(const BlockTable& table, std::int32_t num_tokens, BlockTable& forked,
                         BlockCopy& copy) {
  if (!forked.blocks.empty()) throw std::logic_error("try_fork: the block table is not empty");
  if (blocks_for(num_tokens) > static_cast<std::int32_t>(table.blocks.size()))
    throw std::logic_error("try_fork: the table does not cover the tokens");
  const std::int32_t num_full = num_tokens / tokens_per_block_;
  const bool has_rest = num_tokens % tokens_per_block_ > 0;
  if (has_rest && num_available() == 0) return false;
  copy = {};
  for (std::int32_t i = 0; i < num_full; ++i) {
    add_user(table.blocks[i]);
    forked.blocks.push_back(table.blocks[i]);
  }
  forked.num_indexed = std::min(table.num_indexed, num_full);
  forked.reuse_epoch = table.reuse_epoch;
  if (has_rest) {
    copy = {.from = table.blocks[num_full], .to = take_block()};
    blocks_[copy.to].num_users = 1;
    forked.blocks.push_back(copy.to);
    ++forked.alloc_new_blocks;
    ++alloc_new_blocks_;
  }
  return true;
}

void BlockPool::index_full_blocks(BlockTable& table, const ReuseKey& key,
                                  std::span<const std::int32_t> tokens, std::int32_t num_computed) {
  if (!enable_block_reuse_ || table.reuse_epoch != reuse_epoch_) return;
  const std::int32_t num_full = num_computed / tokens_per_block_;
  for (std::int32_t i = table.num_indexed; i < num_full; ++i) {
    const auto content = tokens.subspan(static_cast<std::size_t>(i) * tokens_per_block_, tokens_per_block_);
    const BlockId parent_block = i == 0 ? kNoBlock : table.blocks[i - 1];
    const ReuseKey block_reuse_key = key_for_block(key, i);
    const BlockId known = find(block_reuse_key, i == 0 ? 0 : blocks_[parent_block].content, content);
    if (known == kNoBlock) {
      insert_in_index(table.blocks[i], block_reuse_key, parent_block, content);
    } else {
      add_user(known);
      drop_user(table.blocks[i]);
      table.blocks[i] = known;
    }
    table.num_indexed = i + 1;
  }
}

void BlockPool::release(BlockTable& table) {
  // From the end, so that the end of a chain is less recently used than its beginning and is evicted first.
  for (auto block = table.blocks.rbegin(); block != table.blocks.rend(); ++block) drop_user(*block);
  table.blocks.clear();
  table.num_indexed = 0;
}

void BlockPool::reset_reuse() {
  ++reuse_epoch_;
  by_beginning_.clear();
  for (Block& block : blocks_) {
    block.parent_block = block.first_child = block.previous_sibling = block.next_sibling = kNoBlock;
  }
  for (BlockId block = 0; block < num_blocks_; ++block) {
    if (blocks_[block].content == 0) continue;
    const bool is_cached = blocks_[block].num_users == 0;
    if (is_cached) unlink_from_cached(block);
    remove_from_index(block);
    if (is_cached) push_free(block);
  }
}

KvCacheStats BlockPool::stats() const {
  KvCacheStats stats;
  stats.max_num_blocks = num_blocks_;
  stats.free_num_blocks = num_available();
  stats.used_num_blocks = num_used();
  stats.tokens_per_block = tokens_per_block_;
  stats.alloc_total_blocks = alloc_new_blocks_ + reused_blocks_;
  stats.alloc_new_blocks = alloc_new_blocks_;
  stats.reused_blocks = reused_blocks_;
  stats.missed_blocks = missed_blocks_;
  const std::int64_t looked_for = reused_blocks_ + missed_blocks_;
  if (looked_for > 0)
    stats.cache_hit_rate = static_cast<double>(reused_blocks_) / static_cast<double>(looked_for);
  stats.partially_reused_blocks = partially_reused_blocks_;
  stats.reused_tokens = reused_tokens_;
  if (has_second_level()) stats.second_level = second_level_.level->stats();
  return stats;
}

std::span<const std::int32_t> BlockPool::tokens_in(BlockId block) const {
  return std::span(indexed_tokens_)
      .subspan(static_cast<std::size_t>(block) * tokens_per_block_, tokens_per_block_);
}

std::size_t BlockPool::bucket_for(const ReuseKey& key, ContentId parent,
                                  std::span<const std::int32_t> tokens) const {
  std::uint64_t hash = mix(key.adapter_generation + 0x9e3779b97f4a7c15ULL * parent);
  hash = mix(hash ^ (key.cache_salt ? *key.cache_salt + 1 : 0)) ^ first_bytes(key.given_digest);
  for (const std::int32_t token : tokens) hash = mix(hash ^ static_cast<std::uint32_t>(token));
  return static_cast<std::size_t>(hash) & (buckets_.size() - 1);
}

BlockId BlockPool::find(const ReuseKey& key, ContentId parent, std::span<const std::int32_t> tokens) const {
  BlockId block = buckets_[bucket_for(key, parent, tokens)];
  while (block != kNoBlock) {
    const Block& candidate = blocks_[block];
    if (candidate.parent == parent && candidate.key == key && std::ranges::equal(tokens_in(block), tokens))
      break;
    block = candidate.next_in_bucket;
  }
  return block;
}

void BlockPool::insert_in_index(BlockId block, const ReuseKey& key, BlockId parent_block,
                                std::span<const std::int32_t> tokens) {
  Block& entry = blocks_[block];
  entry.content = ++last_content_;
  entry.parent = 0;
  entry.key = key;
  if (parent_block != kNoBlock) {
    Block& parent = blocks_[parent_block];
    entry.parent = parent.content;
    entry.parent_block = parent_block;
    entry.next_sibling = parent.first_child;
    if (parent.first_child != kNoBlock) blocks_[parent.first_child].previous_sibling = block;
    parent.first_child = block;
  }
  std::ranges::copy(tokens, indexed_tokens_.begin() + static_cast<std::ptrdiff_t>(block) * tokens_per_block_);
  if (has_second_level()) keys_[block] = compute_key(block);
  BlockId& bucket = buckets_[bucket_for(key, entry.parent, tokens)];
  entry.next_in_bucket = bucket;
  bucket = block;
  insert_by_beginning(block);
  if (events_ != nullptr) record_stored(block);
}

void BlockPool::remove_from_index(BlockId block, bool is_offloaded) {
  Block& entry = blocks_[block];
  if (states_ != nullptr) states_->drop_snapshot(block);
  if (events_ != nullptr) {
    if (is_offloaded) {
      events_->record_level(entry.hash, kPrimaryLevel, kSecondaryLevel);
    } else {
      events_->record_removed(entry.hash);
    }
  }
  BlockId* link = &buckets_[bucket_for(entry.key, entry.parent, tokens_in(block))];
  while (*link != block) link = &blocks_[*link].next_in_bucket;
  *link = entry.next_in_bucket;
  entry.next_in_bucket = kNoBlock;
  erase_by_beginning(block);
  entry.content = 0;
  entry.parent = 0;
  if (entry.parent_block != kNoBlock) {
    (entry.previous_sibling == kNoBlock ? blocks_[entry.parent_block].first_child
                                        : blocks_[entry.previous_sibling].next_sibling) = entry.next_sibling;
    if (entry.next_sibling != kNoBlock) blocks_[entry.next_sibling].previous_sibling = entry.previous_sibling;
    entry.parent_block = entry.previous_sibling = entry.next_sibling = kNoBlock;
  }
  change_retention(block, {});
}

std::uint64_t BlockPool::compute_hash(BlockId block) const {
  const Block& entry = blocks_[block];
  const auto of_key = [&] {
    return mix(entry.key.adapter_generation + 1 + (std::uint64_t{1} << 40) * entry.key.adapter_from) ^
           first_bytes(entry.key.given_digest);
  };
  std::uint64_t hash = 0;
  if (entry.parent_block == kNoBlock) {
    hash = of_key();
  } else {
    const Block& parent = blocks_[entry.parent_block];
    hash = parent.key == entry.key ? parent.hash : mix(parent.hash ^ of_key());
  }
  hash = mix(hash ^ (entry.key.cache_salt ? mix(*entry.key.cache_salt + 0x9e3779b97f4a7c15ULL) : 0));
  for (const std::int32_t token : tokens_in(block)) {
    hash = mix(hash + 0x9e3779b97f4a7c15ULL + static_cast<std::uint32_t>(token));
  }
  return hash;
}

void BlockPool::record_stored(BlockId block) {
  Block& entry = blocks_[block];
  entry.hash = compute_hash(block);
  if (has_second_level() && second_level_.level->take_back_event(keys_[block])) {
    events_->record_level(entry.hash, kSecondaryLevel, kPrimaryLevel);
    return;
  }
  KVCacheStoredBlockData data;
  data.block_hash = entry.hash;
  for (const std::int32_t token : tokens_in(block)) data.tokens.push_back({token, 0});
  data.lora_id = entry.key.task_id;
  data.priority = entry.retention.priority;
  data.cache_salt_id = entry.key.cache_salt;
  const bool is_first = entry.parent_block == kNoBlock;
  events_->record_stored(is_first ? std::nullopt : std::optional(blocks_[entry.parent_block].hash),
                         std::move(data));
}

void BlockPool::push_free(BlockId block) {
  blocks_[block].next = first_free_;
  first_free_ = block;
  ++num_free_;
}

BlockId BlockPool::take_block() {
  if (num_free_ == 0) {
    const BlockId evicted = least_wanted();
    evict(evicted);
    return evicted;
  }
  const BlockId block = first_free_;
  first_free_ = blocks_[block].next;
  blocks_[block].next = kNoBlock;
  --num_free_;
  return block;
}

void BlockPool::add_user(BlockId block) {
  if (blocks_[block].num_users++ == 0) unlink_from_cached(block);
}

void BlockPool::drop_user(BlockId block) {
  if (--blocks_[block].num_users > 0) return;
  if (blocks_[block].content != 0) {
    append_to_cached(block);
  } else {
    push_free(block);
  }
}

}  // namespace adaptrt
