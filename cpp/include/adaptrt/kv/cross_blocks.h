#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "adaptrt/kv/block_pool.h"
#include "adaptrt/kv/reuse_key.h"
#include "adaptrt/kv/second_level.h"

namespace adaptrt {

class CrossBlockPool;

/// Input of an encoder, at least one token.
using EncoderTokens = std::shared_ptr<const std::vector<std::int32_t>>;

/// An encoder input's keys and values in a CrossBlockPool.
struct CrossContent {
  ReuseKey key;
  EncoderTokens tokens;
  std::uint64_t hash = 0;  ///< hash of key and tokens
  std::vector<BlockId> blocks;
  /// True if a step has computed them.
  bool is_written = false;
  /// True if reuse() can find it by key and tokens.
  bool is_known = false;
};

/// A sequence's part of the KvCacheStats counters, over its whole life.
struct CrossCounts {
  std::int64_t alloc_new_blocks = 0;
  std::int64_t reused_blocks = 0;
  std::int64_t missed_blocks = 0;
};

/// Shared ownership of an encoder input's blocks. The pool must outlive it.
class CrossBlocks {
 public:
  explicit CrossBlocks(CrossBlockPool& pool) : pool_(pool) {}
  ~CrossBlocks();
  CrossBlocks(const CrossBlocks&) = delete;
  CrossBlocks& operator=(const CrossBlocks&) = delete;

  [[nodiscard]] const CrossContent& content() const { return entry_->content; }
  [[nodiscard]] const std::vector<BlockId>& blocks() const { return content().blocks; }

 private:
  friend class CrossBlockPool;
  struct Entry {
    CrossContent content;
    /// Expired if no sequence uses it.
    std::weak_ptr<const CrossBlocks> users;
  };
  using EntryRef = std::list<Entry>::iterator;

  CrossBlockPool& pool_;
  EntryRef entry_;
  bool has_entry_ = false;
};

/// Bookkeeping of the blocks for the cross-attention keys and values of encoder inputs. The first sequence
/// with an input writes them once, in the step in which it starts; later they are read whole. The engine owns
/// the memory.
///
/// With reuse, sequences of the same input and ReuseKey, compared exactly, share its blocks: those that start
/// in the same step, those that start while the blocks are in use, and later ones until the blocks are
/// evicted. The least recently used of the unused inputs is evicted first, with all of its blocks, because a
/// part of an input is useless.
class CrossBlockPool {
 public:
  using Share = std::shared_ptr<const CrossBlocks>;

  /// Throws ConfigError unless both numbers are positive.
  CrossBlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block, bool enable_block_reuse);
  CrossBlockPool(const CrossBlockPool&) = delete;
  CrossBlockPool& operator=(const CrossBlockPool&) = delete;

  /// True if reuse() finds the input.
  [[nodiscard]] bool contains(const ReuseKey& key, const EncoderTokens& tokens) const;
  /// Returns the input's blocks, which are written or will be written by the planned step; nullptr if it is
  /// unknown. Updates `counts`, like try_take().
  [[nodiscard]] Share reuse(const ReuseKey& key, const EncoderTokens& tokens, CrossCounts& counts);
  /// Takes new blocks, to be written by the planned step, even if another sequence has that input; nullptr if
  /// there are not enough. reuse() can find them unless it finds others.
  [[nodiscard]] Share try_take(const ReuseKey& key, const EncoderTokens& tokens, CrossCounts& counts);
  /// Records that the step of try_take()'s blocks has run, so that they can be kept. If the same input is
  /// already known by other blocks, `share` changes to those.
  void commit(Share& share);
  /// Forgets all inputs between two steps: blocks of unused ones become free, and used ones are no longer
  /// shared.
  void reset_reuse();

  [[nodiscard]] std::int32_t blocks_for(std::int64_t num_tokens) const {
    return static_cast<std::int32_t>((num_tokens + tokens_per_block_ - 1) / tokens_per_block_);
  }
  [[nodiscard]] std::int32_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] std::int32_t tokens_per_block() const { return tokens_per_block_; }
  /// Number of blocks that try_take() can return: free blocks and those of unused inputs.
  [[nodiscard]] std::int32_t num_available() const { return num_free() + num_cached_; }
  [[nodiscard]] std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  /// Number of blocks of unused inputs.
  [[nodiscard]] std::int32_t num_cached() const { return num_cached_; }
  /// Reused and missed blocks are all blocks of the inputs that reuse() was asked for.
  [[nodiscard]] KvCacheStats stats() const;

  /// Lists every violated invariant of lists, counters and the index; empty if none. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  friend class CrossBlocks;
  using Entry = CrossBlocks::Entry;
  using EntryRef = CrossBlocks::EntryRef;
  using Index = std::unordered_multimap<std::uint64_t, EntryRef>;  // key: hash

  [[nodiscard]] Index::const_iterator find(const ReuseKey& key, const std::vector<std::int32_t>& tokens,
                                           std::uint64_t hash) const;
  [[nodiscard]] Share get_share(EntryRef entry);
  void give_back(EntryRef entry);
  void evict_oldest();
  void forget(EntryRef entry);

  std::int32_t num_blocks_;
  std::int32_t tokens_per_block_;
  bool enable_block_reuse_;
  std::vector<BlockId> free_;
  std::list<Entry> used_;
  std::list<Entry> cached_;  // least recently used first
  Index index_;
  std::int32_t num_cached_ = 0;
  CrossCounts counts_;
  std::int64_t reused_tokens_ = 0;
};

}  // namespace adaptrt
