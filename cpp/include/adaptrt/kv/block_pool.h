#pragma once

#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/kv/kv_cache_events.h"
#include "adaptrt/kv/retention.h"
#include "adaptrt/kv/reuse_key.h"
#include "adaptrt/kv/second_level.h"
#include "adaptrt/kv/state_pool.h"

namespace adaptrt {

/// Options for the blocks that a BlockPool evicts.
struct SecondLevelOptions {
  /// Second level, which must outlive the pool; nullptr: evicted blocks are lost.
  SecondLevel* level = nullptr;
  /// Minimum retention priority of offloaded blocks; blocks of a lower priority are lost.
  std::int32_t min_priority = 0;
  /// Level of the same kind for snapshots of states, under the keys of their blocks, which must outlive the
  /// pool too; nullptr without states. A StateSlot takes the place of a BlockId.
  SecondLevel* states = nullptr;
};

/// Use of a block whose first tokens match a request's and whose later tokens differ.
enum class PartialReuse : std::uint8_t {
  kNone,      ///< none: only full blocks are shared
  kTakeOver,  ///< it is taken over if no table uses it and no block after it is cached
  kCopy,      ///< its content is copied to another block
};

/// Copy of one block's content to another block, to be made before a step writes any KV.
struct BlockCopy {
  BlockId from = kNoBlock;
  BlockId to = kNoBlock;

  bool operator==(const BlockCopy&) const = default;
};

/// A sequence's blocks in the order of its tokens. Only BlockPool fills and empties it.
struct BlockTable {
  std::vector<BlockId> blocks;
  /// Leading blocks that are in the reuse index.
  std::int32_t num_indexed = 0;
  /// Number of reset_reuse() calls before the table got its first block.
  std::uint64_t reuse_epoch = 0;
  // This sequence's part of the KvCacheStats counters, over its whole life.
  std::int64_t alloc_new_blocks = 0;
  std::int64_t reused_blocks = 0;
  std::int64_t missed_blocks = 0;
};

/// TensorRT-LLM's KvCacheStats. Counters start when the pool is made.
struct KvCacheStats {
  std::int64_t max_num_blocks = 0;
  std::int64_t free_num_blocks = 0;  ///< blocks available now, including unused cached ones
  std::int64_t used_num_blocks = 0;  ///< blocks of running sequences
  std::int64_t tokens_per_block = 0;
  std::int64_t alloc_total_blocks = 0;  ///< new and reused
  std::int64_t alloc_new_blocks = 0;
  std::int64_t reused_blocks = 0;
  std::int64_t missed_blocks = 0;  ///< full blocks that were looked up and not found
  double cache_hit_rate = 0.0;     ///< reused / (reused + missed); 0 before the first look-up
  // Not in TensorRT-LLM.
  std::int64_t partially_reused_blocks = 0;      ///< new blocks that begin with a copy of another block's KV
  std::int64_t reused_tokens = 0;                ///< in reused and partially reused blocks
  std::optional<SecondLevelStats> second_level;  ///< nullopt if there is none

  bool operator==(const KvCacheStats&) const = default;
};

/// Bookkeeping of the paged KV cache: which tables use which block. The engine owns the memory.
///
/// A block is free, used (by one or more tables) or cached (full, found by its content, and unused). If no
/// block is free, cached ones are evicted: the lowest retention priority first, then the least recently used,
/// and the end of a chain before its beginning. A block stays at least as long as the blocks after it,
/// whatever its own priority. If the priority of a cached block changes, it counts as just used.
///
/// Content is identified by (ReuseKey, previous block, tokens), compared exactly; the hash only finds
/// candidates. In the index there are never two blocks of equal content. KV does not depend on which sequence
/// computed it, so a second table uses the first one's block.
///
/// With a second level, evicted blocks are offloaded to it, and the continuation of a reused chain is
/// onboarded from there.
///
/// With states, a chain can be reused only up to a block that has a snapshot. A snapshot is dropped together
/// with its block. With a second level of states, it is offloaded then and when another one replaces it, and
/// a chain is continued up to the last block whose snapshot is there.
class BlockPool {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// Reports reusable blocks to `events`, which must outlive the pool; nullptr: no reports. An engine that
  /// keeps no KV has a pool of 0 blocks. `states` has the snapshots of blocks, and must outlive the pool;
  /// nullptr: the engine keeps no states. Throws ConfigError if `num_blocks` is negative or
  /// `tokens_per_block` is not positive, and for a second level without one of snapshots, if there are
  /// states.
  BlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block, bool enable_block_reuse,
            KVCacheEventManager* events = nullptr, PartialReuse partial_reuse = PartialReuse::kNone,
            const SecondLevelOptions& second_level = {}, StatePool* states = nullptr);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  struct PrefixMatch {
    std::int32_t num_blocks = 0;
    /// Number of these blocks that no table uses now. Taking them reduces num_available() by this number.
    std::int32_t num_unused_blocks = 0;
    /// Number of tokens after these blocks that reuse_beginning() would find.
    std::int32_t num_partial_tokens = 0;
    /// Number of matching blocks, including those after the last snapshot of an engine with states.
    std::int32_t num_blocks_with_kv = 0;
  };
  /// Finds the longest chain of cached or used blocks that `tokens` start with, and the tokens that the next
  /// block can start with. At least one token is left to compute, so that there are logits. Changes nothing.
  [[nodiscard]] PrefixMatch match_prefix(const ReuseKey& key, std::span<const std::int32_t> tokens) const;

  /// Gives the matching chain to an empty table. Returns the number of tokens with KV in the chain.
  std::int32_t reuse_prefix(BlockTable& table, const ReuseKey& key, std::span<const std::int32_t> tokens);

  /// Continues a table that reuse_prefix() has filled with the blocks that follow in the second level, as
  /// long as the pool has room; with states, up to a block whose snapshot follows too. Returns the number of
  /// their tokens; their content is in the pool when this returns. `is_still_read` returns true for a block
  /// whose content must still be copied before the next step; such a block is not overwritten.
  std::int32_t onboard(BlockTable& table, const ReuseKey& key, std::span<const std::int32_t> tokens,
                       const std::function<bool(BlockId)>& is_still_read);

  /// Adds a new block to a table that reuse_prefix() has filled, for as many following tokens as another
  /// block begins with. Returns their number. `copy` is the copy to make; kNoBlock twice if there is no such
  /// block or no copy is needed.
  std::int32_t reuse_beginning(BlockTable& table, const ReuseKey& key, std::span<const std::int32_t> tokens,
                               BlockCopy& copy);

  /// Grows the table to `num_tokens` tokens. Returns false, and changes nothing, if there are not enough
  /// blocks.
  [[nodiscard]] bool try_grow(BlockTable& table, std::int32_t num_tokens);

  /// Forks the first `num_tokens` tokens of `table` into an empty table. Full blocks are shared. For a partly
  /// filled block, the fork gets a new block, and `copy` is the copy to make; kNoBlock twice if all are full.
  /// Returns false, and changes nothing, if there is no free block.
  [[nodiscard]] bool try_fork(const BlockTable& table, std::int32_t num_tokens, BlockTable& forked,
                              BlockCopy& copy);

  /// Adds to the reuse index the table's full blocks among the first `num_computed` of `tokens`, whose KV a
  /// completed step has written. May replace blocks of the table by blocks of equal content.
  void index_full_blocks(BlockTable& table, const ReuseKey& key, std::span<const std::int32_t> tokens,
                         std::int32_t num_computed);

  /// Sets the retention of a table's indexed block after its last use. It holds until the next call for that
  /// block or until its duration ends.
  void set_retention(const BlockTable& table, std::int32_t index, const BlockRetention& retention);
  /// Sets the time that durations are measured by, which must not decrease, and ends the durations that have
  /// passed.
  void set_time(Time now);

  /// Releases all blocks of the table. Indexed ones without another user stay cached.
  void release(BlockTable& table);

  /// Empties the reuse index: cached blocks become free, and used ones are no longer shared. The second level
  /// keeps its blocks.
  void reset_reuse();

  /// Copies all content to the second level until the deadline: first used blocks, then the blocks that would
  /// be evicted last. No step may run meanwhile.
  void offload_all(Time deadline);

  [[nodiscard]] std::int32_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] std::int32_t tokens_per_block() const { return tokens_per_block_; }
  [[nodiscard]] bool has_second_level() const { return second_level_.level != nullptr; }
  [[nodiscard]] PartialReuse partial_reuse() const { return partial_reuse_; }
  /// Number of free and cached blocks, which try_grow() can use.
  [[nodiscard]] std::int32_t num_available() const { return num_free_ + num_cached_; }
  [[nodiscard]] std::int32_t num_free() const { return num_free_; }
  [[nodiscard]] std::int32_t num_cached() const { return num_cached_; }
  [[nodiscard]] std::int32_t num_used() const { return num_blocks_ - num_available(); }
  /// Number of blocks that hold `num_tokens` tokens; 0 if the engine keeps no KV.
  [[nodiscard]] std::int32_t blocks_for(std::int64_t num_tokens) const {
    if (num_blocks_ == 0) return 0;
    return static_cast<std::int32_t>((num_tokens + tokens_per_block_ - 1) / tokens_per_block_);
  }
  /// Number of tables that hold the block.
  [[nodiscard]] std::int32_t num_users(BlockId block) const { return blocks_[block].num_users; }
  /// True if the block can be found by its content.
  [[nodiscard]] bool is_indexed(BlockId block) const { return blocks_[block].content != 0; }
  [[nodiscard]] KvCacheStats stats() const;

  /// Lists every violated invariant of lists, counters and the index; empty if none. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  /// Unique id of a block's content; 0 if it is not in the index.
  using ContentId = std::uint64_t;

  struct Block {
    std::int32_t num_users = 0;
    // Neighbours in the free list (only `next`) or, if cached, in the list ordered by last use.
    BlockId previous = kNoBlock;
    BlockId next = kNoBlock;
    BlockId next_in_bucket = kNoBlock;
    ContentId content = 0;
    ContentId parent = 0;
    ReuseKey key;
    // For blocks in the index: the previous block and the blocks after it.
    BlockId parent_block = kNoBlock;
    BlockId first_child = kNoBlock;
    BlockId previous_sibling = kNoBlock;
    BlockId next_sibling = kNoBlock;
    BlockRetention retention;
    std::uint64_t hash = 0;  // hash of its content, if there are events
    // For cached blocks: the highest priority of the block and the blocks after it, and the end of its
    // duration.
    std::int32_t level = kDefaultRetentionPriority;
    Time expiry;
  };
  /// The cached blocks of one level, ordered by last use.
  struct CachedList {
    BlockId oldest = kNoBlock;
    BlockId newest = kNoBlock;
  };

  struct Beginning {
    BlockId block = kNoBlock;
    std::int32_t num_tokens = 0;
  };

  [[nodiscard]] std::span<const std::int32_t> tokens_in(BlockId block) const;
  [[nodiscard]] std::size_t bucket_for(const ReuseKey& key, ContentId parent,
                                       std::span<const std::int32_t> tokens) const;
  [[nodiscard]] BlockId find(const ReuseKey& key, ContentId parent,
                             std::span<const std::int32_t> tokens) const;
  void insert_in_index(BlockId block, const ReuseKey& key, BlockId parent_block,
                       std::span<const std::int32_t> tokens);
  /// `is_offloaded`: the second level has a copy.
  void remove_from_index(BlockId block, bool is_offloaded = false);
  [[nodiscard]] BlockKey compute_key(BlockId block) const;
  /// Returns the parent key that block_key() needs for a block after `parent`.
  [[nodiscard]] BlockKey key_before(const ReuseKey& key, BlockId parent) const;
  /// Returns the ReuseKey of block `index` of a table whose tokens have `key`.
  [[nodiscard]] ReuseKey key_for_block(const ReuseKey& key, std::int32_t index) const {
    return key.for_tokens_before((index + 1) * tokens_per_block_);
  }
  /// Returns true if the second level has a copy.
  [[nodiscard]] bool offload(BlockId block);
  /// True if offload_snapshot() would find a snapshot.
  [[nodiscard]] bool has_snapshot_to_offload(BlockId block) const;
  /// Offloads the block's snapshot if there is one, and a level for it.
  void offload_snapshot(BlockId block);
  /// Offloads the snapshots after these blocks, the most important first.
  void offload_snapshots(std::vector<BlockId>& order, Time deadline);
  /// Lists in wanted_ the blocks that follow the table's in the second level. With states, they begin with
  /// the blocks that follow in the pool, whose number is returned, and end with one whose snapshot is in the
  /// level.
  [[nodiscard]] std::size_t find_wanted(const BlockTable& table, const ReuseKey& key,
                                        std::span<const std::int32_t> tokens);
  /// Adds the wanted blocks to the table as long as they can be had.
  void take_wanted(BlockTable& table, const ReuseKey& key, std::size_t num_in_pool,
                   const std::function<bool(BlockId)>& is_still_read);
  /// Reads the snapshot of the last wanted block to a slot. Returns kNoStateSlot if it cannot be had.
  [[nodiscard]] StateSlot read_snapshot();
  void record_lost();
  /// Returns the block that take_block() would return.
  [[nodiscard]] BlockId next_block() const { return num_free_ > 0 ? first_free_ : least_wanted(); }
  /// Position in by_beginning_ of a block with this content, or the position to insert it at.
  [[nodiscard]] std::vector<BlockId>::const_iterator find_place(const ReuseKey& key, ContentId parent,
                                                                std::span<const std::int32_t> tokens) const;
  /// Finds the block that shares the most leading tokens with `tokens`, except for the last one. Returns
  /// kNoBlock if using the blocks of `full` leaves no block.
  [[nodiscard]] Beginning find_beginning(const PrefixMatch& full, const ReuseKey& key, ContentId parent,
                                         std::span<const std::int32_t> tokens) const;
  void insert_by_beginning(BlockId block);
  void erase_by_beginning(BlockId block);
  void push_free(BlockId block);
  BlockId take_block();
  void add_user(BlockId block);
  void drop_user(BlockId block);
  void append_to_cached(BlockId block);
  void unlink_from_cached(BlockId block);
  // Insert into and remove from its level's list.
  void append(BlockId block);
  void unlink(BlockId block);
  [[nodiscard]] BlockId least_wanted() const;
  void evict(BlockId block);
  [[nodiscard]] std::int32_t compute_level(BlockId block) const;
  /// Moves a cached block whose level may have changed, and the blocks before it.
  void move_in_cached(BlockId block);
  void change_retention(BlockId block, const BlockRetention& retention);
  /// The same for a block that stays in the index.
  void update_retention(BlockId block, const BlockRetention& retention);
  [[nodiscard]] std::uint64_t compute_hash(BlockId block) const;
  void record_stored(BlockId block);

  std::int32_t num_blocks_;
  std::int32_t tokens_per_block_;
  bool enable_block_reuse_;
  KVCacheEventManager* events_;
  PartialReuse partial_reuse_;
  SecondLevelOptions second_level_;
  StatePool* states_;
  std::vector<Block> blocks_;
  std::vector<BlockKey> keys_;      // [num_blocks], for blocks in the index; empty without a second level
  std::vector<KeyedBlock> wanted_;  // scratch of onboard()
  std::vector<std::int32_t> indexed_tokens_;  // [num_blocks, tokens_per_block], for blocks in the index
  std::vector<BlockId> buckets_;
  /// Blocks in the index, sorted by parent, key and tokens; empty without partial reuse.
  std::vector<BlockId> by_beginning_;
  BlockId first_free_ = kNoBlock;
  std::array<CachedList, kMaxRetentionPriority + 1> cached_;
  std::array<std::uint64_t, 2> used_levels_{};   // one bit per non-empty list
  std::set<std::pair<Time, BlockId>> expiring_;  // cached blocks with a duration
  std::int32_t num_special_ = 0;                 // blocks whose priority is not the default one
  Time now_;
  std::int32_t num_free_ = 0;
  std::int32_t num_cached_ = 0;
  ContentId last_content_ = 0;
  std::uint64_t reuse_epoch_ = 0;
  std::int64_t alloc_new_blocks_ = 0;
  std::int64_t reused_blocks_ = 0;
  std::int64_t missed_blocks_ = 0;
  std::int64_t partially_reused_blocks_ = 0;
  std::int64_t reused_tokens_ = 0;
};

}  // namespace adaptrt
