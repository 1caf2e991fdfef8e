// Partial reuse: blocks whose first tokens equal those of another block.

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "adaptrt/kv/block_pool.h"

namespace adaptrt {

namespace {

std::int32_t common_length(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  return static_cast<std::int32_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

}  // namespace

std::vector<BlockId>::const_iterator BlockPool::find_place(const ReuseKey& key, ContentId parent,
                                                           std::span<const std::int32_t> tokens) const {
  const auto is_before = [&](BlockId block, std::span<const std::int32_t> wanted) {
    const Block& entry = blocks_[block];
    if (entry.parent != parent) return entry.parent < parent;
    if (entry.key != key) return entry.key < key;
    return std::ranges::lexicographical_compare(tokens_in(block), wanted);
  };
  return std::lower_bound(by_beginning_.begin(), by_beginning_.end(), tokens, is_before);
}

BlockPool::Beginning BlockPool::find_beginning(const PrefixMatch& full, const ReuseKey& key, ContentId parent,
                                               std::span<const std::int32_t> tokens) const {
  Beginning longest;
  if (partial_reuse_ == PartialReuse::kNone || tokens.size() < 2) return longest;
  // At least the last token must be computed.
  const auto wanted = tokens.first(std::min(tokens.size() - 1, static_cast<std::size_t>(tokens_per_block_)));
  const auto place = find_place(key, parent, wanted);
  // The order is sorted, so the block that shares the most tokens is next to their position.
  const auto consider = [&](BlockId block) {
    if (blocks_[block].parent != parent || blocks_[block].key != key) return;
    const std::int32_t length = common_length(tokens_in(block), wanted);
    if (length > longest.num_tokens) longest = {block, length};
  };
  if (place != by_beginning_.end()) consider(*place);
  if (place != by_beginning_.begin()) consider(*std::prev(place));
  if (longest.block == kNoBlock) return longest;

  const Block& found = blocks_[longest.block];
  const bool is_unused = found.num_users == 0;
  const bool may_be_had = partial_reuse_ == PartialReuse::kCopy
                              ? num_available() - full.num_unused_blocks > (is_unused ? 1 : 0)
                              : is_unused && found.first_child == kNoBlock;
  return may_be_had ? longest : Beginning{};
}

std::int32_t BlockPool::reuse_beginning(BlockTable& table, const ReuseKey& key,
                                        std::span<const std::int32_t> tokens, BlockCopy& copy) {
  copy = {};
  if (table.num_indexed != static_cast<std::int32_t>(table.blocks.size())) {
    throw std::logic_error("reuse_beginning: the block table ends in a block of its own");
  }
  if (partial_reuse_ == PartialReuse::kNone) return 0;
  const std::size_t num_full = table.blocks.size() * static_cast<std::size_t>(tokens_per_block_);
  const ContentId parent = table.blocks.empty() ? 0 : blocks_[table.blocks.back()].content;
  const ReuseKey block_reuse_key = key_for_block(key, static_cast<std::int32_t>(table.blocks.size()));
  const Beginning found = find_beginning({}, block_reuse_key, parent, tokens.subspan(num_full));
  if (found.block == kNoBlock) return 0;
  BlockId block = found.block;
  if (partial_reuse_ == PartialReuse::kTakeOver) {
    const bool is_offloaded = offload(block);
    unlink_from_cached(block);
    remove_from_index(block, is_offloaded);
    record_lost();
  } else {
    // Mark it as used, so that it is not evicted to make room for its own copy.
    const bool is_unused = blocks_[found.block].num_users == 0;
    if (is_unused) add_user(found.block);
    block = take_block();
    if (is_unused) drop_user(found.block);
    copy = {found.block, block};
  }
  blocks_[block].num_users = 1;
  table.blocks.push_back(block);
  ++table.alloc_new_blocks;
  ++alloc_new_blocks_;
  ++partially_reused_blocks_;
  reused_tokens_ += found.num_tokens;
  return found.num_tokens;
}

void BlockPool::insert_by_beginning(BlockId block) {
  if (partial_reuse_ == PartialReuse::kNone) return;
  const Block& entry = blocks_[block];
  by_beginning_.insert(find_place(entry.key, entry.parent, tokens_in(block)), block);
}

void BlockPool::erase_by_beginning(BlockId block) {
  if (by_beginning_.empty()) return;
  const Block& entry = blocks_[block];
  by_beginning_.erase(find_place(entry.key, entry.parent, tokens_in(block)));
}

}  // namespace adaptrt
