#include "adaptrt/kv/cross_blocks.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "mix.h"

namespace adaptrt {

namespace {

std::uint64_t compute_hash(const ReuseKey& key, const std::vector<std::int32_t>& tokens) {
  std::uint64_t hash = mix(key.adapter_generation + 1);
  hash = mix(hash ^ (key.cache_salt ? mix(*key.cache_salt + 1) : 0));
  for (const std::int32_t token : tokens) hash = mix(hash + static_cast<std::uint32_t>(token) + 1);
  return hash;
}

}  // namespace

CrossBlocks::~CrossBlocks() {
  if (has_entry_) pool_.give_back(entry_);
}

CrossBlockPool::CrossBlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block,
                               bool enable_block_reuse)
    : num_blocks_(num_blocks), tokens_per_block_(tokens_per_block), enable_block_reuse_(enable_block_reuse) {
  if (num_blocks < 1 || tokens_per_block < 1) {
    throw ConfigError("a pool of encoder inputs needs blocks and tokens, not " + std::to_string(num_blocks) +
                      " blocks of " + std::to_string(tokens_per_block));
  }
  free_.resize(static_cast<std::size_t>(num_blocks));
  std::iota(free_.begin(), free_.end(), 0);
}

bool CrossBlockPool::contains(const ReuseKey& key, const EncoderTokens& tokens) const {
  return enable_block_reuse_ && find(key, *tokens, compute_hash(key, *tokens)) != index_.end();
}

CrossBlockPool::Share CrossBlockPool::reuse(const ReuseKey& key, const EncoderTokens& tokens,
                                            CrossCounts& counts) {
  if (!enable_block_reuse_) return nullptr;
  const auto found = find(key, *tokens, compute_hash(key, *tokens));
  const auto num_tokens = static_cast<std::int64_t>(tokens->size());
  const std::int64_t num_blocks = blocks_for(num_tokens);
  if (found == index_.end()) {
    counts.missed_blocks += num_blocks;
    counts_.missed_blocks += num_blocks;
    return nullptr;
  }
  counts.reused_blocks += num_blocks;
  counts_.reused_blocks += num_blocks;
  reused_tokens_ += num_tokens;
  return get_share(found->second);
}

CrossBlockPool::Share CrossBlockPool::try_take(const ReuseKey& key, const EncoderTokens& tokens,
                                               CrossCounts& counts) {
  const std::int32_t wanted = blocks_for(static_cast<std::int64_t>(tokens->size()));
  if (wanted > num_available()) return nullptr;
  while (wanted > num_free()) evict_oldest();

  const std::uint64_t hash = compute_hash(key, *tokens);
  std::list<Entry> taken(1);
  const EntryRef entry = taken.begin();
  entry->content = {.key = key,
                    .tokens = tokens,
                    .hash = hash,
                    .blocks = {free_.end() - wanted, free_.end()},
                    .is_known = enable_block_reuse_ && find(key, *tokens, hash) == index_.end()};
  const auto share = std::make_shared<CrossBlocks>(*this);
  if (entry->content.is_known) index_.emplace(hash, entry);
  // Nothing can fail from here on.
  used_.splice(used_.end(), taken);
  free_.erase(free_.end() - wanted, free_.end());
  share->entry_ = entry;
  share->has_entry_ = true;
  entry->users = share;
  counts.alloc_new_blocks += wanted;
  counts_.alloc_new_blocks += wanted;
  return share;
}

void CrossBlockPool::commit(Share& share) {
  const EntryRef entry = share->entry_;
  entry->content.is_written = true;
  if (!enable_block_reuse_ || entry->content.is_known) return;
  const CrossContent& content = entry->content;
  const auto known = find(content.key, *content.tokens, content.hash);
  if (known == index_.end()) {
    index_.emplace(content.hash, entry);
    entry->content.is_known = true;
  } else {
    share = get_share(known->second);
  }
}

void CrossBlockPool::reset_reuse() {
  while (!cached_.empty()) evict_oldest();
  index_.clear();
  for (Entry& entry : used_) entry.content.is_known = false;
}

CrossBlockPool::Index::const_iterator CrossBlockPool::find(const ReuseKey& key,
                                                           const std::vector<std::int32_t>& tokens,
                                                           std::uint64_t hash) const {
  const auto [first, last] = index_.equal_range(hash);
  const auto found = std::find_if(first, last, [&](const auto& candidate) {
    const CrossContent& content = candidate.second->content;
    return content.key == key && *content.tokens == tokens;
  });
  return found == last ? index_.end() : found;
}

CrossBlockPool::Share CrossBlockPool::get_share(EntryRef entry) {
  if (Share users = entry->users.lock()) return users;
  const auto share = std::make_shared<CrossBlocks>(*this);
  used_.splice(used_.end(), cached_, entry);
  num_cached_ -= static_cast<std::int32_t>(entry->content.blocks.size());
  share->entry_ = entry;
  share->has_entry_ = true;
  entry->users = share;
  return share;
}

void CrossBlockPool::give_back(EntryRef entry) {
  if (entry->content.is_written && entry->content.is_known) {
    cached_.splice(cached_.end(), used_, entry);
    num_cached_ += static_cast<std::int32_t>(entry->content.blocks.size());
  } else {
    forget(entry);
    used_.erase(entry);
  }
}

void CrossBlockPool::evict_oldest() {
  num_cached_ -= static_cast<std::int32_t>(cached_.front().content.blocks.size());
  forget(cached_.begin());
  cached_.pop_front();
}

void CrossBlockPool::forget(EntryRef entry) {
  const CrossContent& content = entry->content;
  if (content.is_known) index_.erase(find(content.key, *content.tokens, content.hash));
  free_.insert(free_.end(), content.blocks.begin(),
               content.blocks.end());  // they were in this vector before, so there is room
}

KvCacheStats CrossBlockPool::stats() const {
  KvCacheStats stats;
  stats.max_num_blocks = num_blocks_;
  stats.free_num_blocks = num_available();
  stats.used_num_blocks = num_blocks_ - num_available();
  stats.tokens_per_block = tokens_per_block_;
  stats.alloc_total_blocks = counts_.alloc_new_blocks + counts_.reused_blocks;
  stats.alloc_new_blocks = counts_.alloc_new_blocks;
  stats.reused_blocks = counts_.reused_blocks;
  stats.missed_blocks = counts_.missed_blocks;
  if (const std::int64_t looked_for = counts_.reused_blocks + counts_.missed_blocks; looked_for > 0) {
    stats.cache_hit_rate = static_cast<double>(counts_.reused_blocks) / static_cast<double>(looked_for);
  }
  stats.reused_tokens = reused_tokens_;
  return stats;
}

std::vector<std::string> CrossBlockPool::check_invariants() const {
  std::vector<std::string> violations;
  const auto check = [&](bool holds, const char* what) {
    if (!holds) violations.push_back(std::string("encoder inputs: ") + what);
  };
  std::set<BlockId> blocks(free_.begin(), free_.end());
  check(blocks.size() == free_.size(), "a block is free twice");
  std::size_t num_known = 0;
  std::int32_t num_cached = 0;
  const auto check_entry = [&](const Entry& entry, bool is_used) {
    const CrossContent& content = entry.content;
    check(entry.users.expired() != is_used, "an input is used and cached, or neither");
    check(
        std::cmp_equal(content.blocks.size(), blocks_for(static_cast<std::int64_t>(content.tokens->size()))),
        "an input has blocks for another length");
    for (const BlockId block : content.blocks) {
      check(block >= 0 && block < num_blocks_ && blocks.insert(block).second,
            "a block has two contents, or is free and has one");
    }
    if (!is_used) {
      num_cached += static_cast<std::int32_t>(content.blocks.size());
      check(content.is_written && content.is_known, "an input is cached but cannot be reused");
    }
    check(content.hash == compute_hash(content.key, *content.tokens), "an input has a wrong hash");
    if (!content.is_known) return;
    ++num_known;
    const auto found = find(content.key, *content.tokens, content.hash);
    check(found != index_.end() && &*found->second == &entry, "an input is not found by its content");
  };
  for (const Entry& entry : used_) check_entry(entry, true);
  for (const Entry& entry : cached_) check_entry(entry, false);
  check(std::cmp_equal(blocks.size(), num_blocks_), "a block is lost");
  check(num_cached == num_cached_, "the blocks of cached inputs are miscounted");
  check(num_known == index_.size(), "the index has evicted inputs");
  check(enable_block_reuse_ || num_known == 0, "an input is in the index although reuse is off");
  return violations;
}

}  // namespace adaptrt
