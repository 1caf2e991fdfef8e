#include <string>
#include <unordered_map>
#include <vector>

#include "adaptrt/kv/block_pool.h"

namespace adaptrt {

std::vector<std::string> BlockPool::check_invariants() const {
  std::vector<std::string> violations;
  const auto report = [&](BlockId block, const char* what) {
    violations.push_back("block " + std::to_string(block) + " " + what);
  };
  std::vector<int> lists(blocks_.size(), 0);

  std::int32_t num_free = 0;
  for (BlockId block = first_free_; block != kNoBlock && num_free <= num_blocks_;
       block = blocks_[block].next) {
    ++num_free;
    ++lists[block];
    if (blocks_[block].num_users != 0) report(block, "is free and has users");
    if (blocks_[block].content != 0) report(block, "is free and in the reuse index");
  }
  if (num_free != num_free_) violations.emplace_back("the free list does not have num_free() blocks");

  std::int32_t num_cached = 0;
  std::unordered_map<ContentId, std::int32_t> age;  // position in the eviction order
  for (std::int32_t level = 0; level <= kMaxRetentionPriority; ++level) {
    const CachedList& list = cached_[static_cast<std::size_t>(level)];
    BlockId previous = kNoBlock;
    for (BlockId block = list.oldest; block != kNoBlock && num_cached <= num_blocks_;
         block = blocks_[block].next) {
      if (blocks_[block].previous != previous)
        report(block, "has a wrong link to the block cached before it");
      previous = block;
      age[blocks_[block].content] = num_cached++;
      ++lists[block];
      if (blocks_[block].num_users != 0) report(block, "is cached and has users");
      if (blocks_[block].content == 0) report(block, "is cached and not in the reuse index");
      if (blocks_[block].level != level) report(block, "is in another level's list");
      if (compute_level(block) != level)
        report(block, "has another level than it and the blocks after it need");
      if (blocks_[block].retention.duration && !expiring_.contains({blocks_[block].expiry, block})) {
        report(block, "has a duration that does not end");
      }
      if (blocks_[block].retention.duration && blocks_[block].expiry <= now_) {
        report(block, "is kept longer than its duration");
      }
    }
    if (previous != list.newest)
      violations.emplace_back("a list of cached blocks does not end in its newest");
    const bool is_marked = (used_levels_[static_cast<std::size_t>(level / 64)] >> (level % 64) & 1U) != 0;
    if (is_marked != (list.oldest != kNoBlock))
      violations.emplace_back(
          "a list of cached blocks is empty and not known as such, or the other way round");
  }
  if (num_cached != num_cached_)
    violations.emplace_back("the lists of cached blocks do not have num_cached() blocks");
  for (const auto& [expiry, block] : expiring_) {
    if (lists[block] != 1 || !blocks_[block].retention.duration || blocks_[block].expiry != expiry)
      report(block, "has a duration that ends, and is not cached with it");
  }

  std::int32_t num_special = 0;
  std::vector<BlockId> found_parent(blocks_.size(), kNoBlock);
  std::size_t num_children = 0;
  for (BlockId block = 0; block < num_blocks_; ++block) {
    const Block& entry = blocks_[block];
    if (entry.retention.priority != kDefaultRetentionPriority) ++num_special;
    if (entry.content == 0 && entry.retention != BlockRetention{}) report(block, "has no content to retain");
    BlockId before = kNoBlock;
    for (BlockId child = entry.first_child; child != kNoBlock && num_children <= blocks_.size();
         child = blocks_[child].next_sibling) {
      ++num_children;
      if (blocks_[child].previous_sibling != before) report(child, "has a wrong link to its sibling");
      before = child;
      found_parent[child] = block;
    }
  }
  if (num_special != num_special_)
    violations.emplace_back("blocks of another priority than the default one are miscounted");
  for (BlockId block = 0; block < num_blocks_; ++block) {
    const Block& entry = blocks_[block];
    if (entry.parent_block != found_parent[block]) report(block, "is not among its parent's children");
    const ContentId parent = entry.parent_block == kNoBlock ? 0 : blocks_[entry.parent_block].content;
    if (parent != entry.parent) report(block, "has a parent of another content");
  }

  std::unordered_map<ContentId, BlockId> by_content;
  for (BlockId block = 0; block < num_blocks_; ++block) {
    const Block& entry = blocks_[block];
    if (lists[block] + (entry.num_users > 0 ? 1 : 0) != 1)
      report(block, "is not exactly one of free, cached and used");
    if (entry.content == 0) continue;
    if (!by_content.emplace(entry.content, block).second) report(block, "shares its content id with another");
    if (find(entry.key, entry.parent, tokens_in(block)) != block)
      report(block, "is not found by its content");
    if (events_ != nullptr && entry.hash != compute_hash(block)) report(block, "was stored by another hash");
    if (has_second_level() && keys_[block] != compute_key(block)) {
      report(block, "has a key for the second level that is not that of its content");
    }
  }
  for (const auto& [content, block] : by_content) {
    const ContentId parent = blocks_[block].parent;
    if (parent == 0) continue;
    const auto found = by_content.find(parent);
    if (found == by_content.end()) {
      report(block, "stays in the reuse index without the block before it");
    } else if (blocks_[block].num_users > blocks_[found->second].num_users) {
      report(block, "has users that do not use the block before it");
    } else if (age.contains(parent) && age.at(parent) < age.at(content)) {
      report(block, "would be evicted after the block before it");
    }
  }

  if (partial_reuse_ != PartialReuse::kNone) {
    if (by_beginning_.size() != by_content.size())
      violations.emplace_back("the blocks by their beginnings are not those in the index");
    for (std::size_t i = 0; i < by_beginning_.size(); ++i) {
      const Block& entry = blocks_[by_beginning_[i]];
      const auto place = find_place(entry.key, entry.parent, tokens_in(by_beginning_[i]));
      if (entry.content == 0 || place - by_beginning_.begin() != static_cast<std::ptrdiff_t>(i))
        report(by_beginning_[i], "is not where its beginning is looked for");
    }
  }

  std::size_t num_in_buckets = 0;
  for (BlockId head : buckets_) {
    for (; head != kNoBlock && num_in_buckets <= blocks_.size(); head = blocks_[head].next_in_bucket)
      ++num_in_buckets;
  }
  if (num_in_buckets != by_content.size())
    violations.emplace_back("the buckets do not hold the indexed blocks once each");
  for (const SecondLevel* level : {second_level_.level, second_level_.states}) {
    if (level == nullptr) continue;
    const auto of_level = level->check_invariants();
    violations.insert(violations.end(), of_level.begin(), of_level.end());
  }
  return violations;
}

}  // namespace adaptrt
