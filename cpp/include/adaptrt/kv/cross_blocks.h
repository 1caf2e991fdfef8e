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
  std::uint64_t hash = 0;  ///< of key and tokens
  std::vector<BlockId> blocks;
  /// True if a step has computed them.
  bool is_written = false;
  /// Found by those that have the same key and tokens.
  bool is_known = false;
};

/// A sequence's share of KvCacheStats' counters, over its whole life.
struct CrossCounts {
  std::int64_t alloc_new_blocks = 0;
  std::int64_t reused_blocks = 0;
  std::int64_t missed_blocks = 0;
};

/// Shared ownership of an encoder input's blocks. The pool outlives it.
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

/// Bookkeeping of the blocks for the cross-attention keys and values of encoder inputs. They are written
/// once, in the step in which the first sequence with that input starts, and read whole. The memory belongs
/// to the engine.
///
/// With reuse, sequences of the same input and ReuseKey, compared exactly, share its blocks: those that start
/// in the step which writes them, those that start while another sequence uses them, and those that start
/// later, as long as no other input needed the room. The least recently used of the unused inputs is evicted
/// first, with all of its blocks, because a part of an input is useless.
class CrossBlockPool {
 public:
  using Share = std::shared_ptr<const CrossBlocks>;

  /// Throws ConfigError unless both numbers are positive.
  CrossBlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block, bool enable_block_reuse);
  CrossBlockPool(const CrossBlockPool&) = delete;
  CrossBlockPool& operator=(const CrossBlockPool&) = delete;

  /// True if reuse() finds the input.
  [[nodiscard]] bool contains(const ReuseKey& key, const EncoderTokens& tokens) const;
  /// The input's blocks, which are written, or will be by the step that is being planned; nullptr when it is
  /// not known. Counts in `counts` as well, like try_take().
  [[nodiscard]] Share reuse(const ReuseKey& key, const EncoderTokens& tokens, CrossCounts& counts);
  /// New blocks, to be written by the step that is being planned, whoever else has that input; nullptr when
  /// there are not enough. reuse() finds them unless it finds others.
  [[nodiscard]] Share try_take(const ReuseKey& key, const EncoderTokens& tokens, CrossCounts& counts);
  /// The step that writes what try_take() gave has run: it can be kept from now on. Where other blocks are
  /// known for the same input, `share` becomes one in those.
  void commit(Share& share);

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
  /// Reused and missed are all blocks of the inputs that reuse() was asked for.
  [[nodiscard]] KvCacheStats stats() const;

  /// Returns every inconsistency between lists, counters and the index; empty if there is none. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  friend class CrossBlocks;
  using Entry = CrossBlocks::Entry;
  using EntryRef = CrossBlocks::EntryRef;
  using Index = std::unordered_multimap<std::uint64_t, EntryRef>;  // by hash

  [[nodiscard]] Index::const_iterator find(const ReuseKey& key, const std::vector<std::int32_t>& tokens,
                                           std::uint64_t hash) const;
  [[nodiscard]] Share share_of(EntryRef entry);
  void give_back(EntryRef entry);
  void evict_oldest();
  void forget(EntryRef entry);

  std::int32_t num_blocks_;
  std::int32_t tokens_per_block_;
  bool enable_block_reuse_;
  std::vector<BlockId> free_;
  std::list<Entry> used_;
  std::list<Entry> cached_;  // the least recently used first
  Index index_;
  std::int32_t num_cached_ = 0;
  CrossCounts counts_;
  std::int64_t reused_tokens_ = 0;
};

}  // namespace adaptrt
