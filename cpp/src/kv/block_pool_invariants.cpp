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
  BlockId previous = kNoBlock;
  std::unordered_map<ContentId, std::int32_t> age;  // position in the list of cached blocks, oldest first
  for (BlockId block = oldest_cached_; block != kNoBlock && num_cached <= num_blocks_;
       block = blocks_[block].next) {
    if (blocks_[block].previous != previous) report(block, "has a wrong link to the block cached before it");
    previous = block;
    age[blocks_[block].content] = num_cached++;
    ++lists[block];
    if (blocks_[block].num_users != 0) report(block, "is cached and has users");
    if (blocks_[block].content == 0) report(block, "is cached and not in the reuse index");
  }
  if (previous != newest_cached_)
    violations.emplace_back("the list of cached blocks does not end in its newest");
  if (num_cached != num_cached_)
    violations.emplace_back("the list of cached blocks does not have num_cached() blocks");

  std::unordered_map<ContentId, BlockId> by_content;
  for (BlockId block = 0; block < num_blocks_; ++block) {
    const Block& entry = blocks_[block];
    if (lists[block] + (entry.num_users > 0 ? 1 : 0) != 1)
      report(block, "is not exactly one of free, cached and used");
    if (entry.content == 0) continue;
    if (!by_content.emplace(entry.content, block).second) report(block, "shares its content id with another");
    if (find(entry.key, entry.parent, tokens_of(block)) != block)
      report(block, "is not found by its content");
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

  std::size_t num_in_buckets = 0;
  for (BlockId head : buckets_) {
    for (; head != kNoBlock && num_in_buckets <= blocks_.size(); head = blocks_[head].next_in_bucket)
      ++num_in_buckets;
  }
  if (num_in_buckets != by_content.size())
    violations.emplace_back("the buckets do not hold the indexed blocks once each");
  return violations;
}

}  // namespace adaptrt
