#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/kv/block_pool.h"
#include "adaptrt/kv/cross_blocks.h"
#include "adaptrt/kv/kv_cache_events.h"
#include "adaptrt/kv/retention.h"
#include "adaptrt/kv/reuse_key.h"
#include "adaptrt/kv/state_pool.h"

namespace adaptrt {

/// States that one sequence keeps, of recurrent layers for example.
struct HeldStates {
  /// States after the computed tokens; kNoStateSlot before the first ones and in engines without states.
  StateSlot slot = kNoStateSlot;
  /// Copy of them as they were before the planned step, which computes drafts; kNoStateSlot in other steps.
  StateSlot saved = kNoStateSlot;
  /// Number of first tokens whose KV others had when the sequence started, up to a block's end: later
  /// sequences probably begin with them too.
  std::int32_t num_shared_tokens = 0;
  /// Index of the block after which the sequence took its newest snapshot of generated tokens; -1: none.
  std::int32_t generated_snapshot = -1;
};

/// Memory that one sequence keeps between steps. Only SequenceMemoryPool changes it.
struct SequenceMemory {
  /// Number of tokens at the front that are computed: `table` has their keys and values.
  std::int32_t num_computed = 0;
  BlockTable table;
  /// Keys and values of the encoder input; nullptr without one. Sequences with the same input share them.
  CrossBlockPool::Share cross;
  CrossCounts cross_counts;
  HeldStates states;

  [[nodiscard]] const std::vector<BlockId>& blocks() const { return table.blocks; }
  [[nodiscard]] std::int64_t num_blocks() const { return std::ssize(table.blocks); }
};

/// Content of a sequence, as far as it decides what memory can be reused.
struct SequenceContent {
  ReuseKey key = {};
  std::span<const std::int32_t> tokens;
  std::int32_t prompt_length = 0;
  /// nullptr for the default retention of all its blocks.
  const KvCacheRetentionConfig* retention = nullptr;
  /// True if snapshots of states are taken between its generated tokens too.
  bool continues_later = true;
};

/// Memory that a new sequence can start from instead of computing its first tokens.
struct ReusablePrefix {
  std::int32_t num_tokens = 0;
  /// Number of full blocks, which the sequence shares with others.
  std::int32_t num_blocks = 0;
  /// Number of these blocks that no sequence holds now. Taking them reduces num_available() by this number.
  std::int32_t num_unused_blocks = 0;
};

struct SequenceMemoryOptions {
  /// 0 for an engine that keeps no KV.
  std::int32_t num_blocks = 0;
  std::int32_t tokens_per_block = 0;
  /// 0 for an engine without an encoder.
  std::int32_t num_cross_blocks = 0;
  bool enable_block_reuse = true;
  PartialReuse partial_reuse = PartialReuse::kNone;
  /// Gets the events of reusable blocks, and must outlive the pool; nullptr: no events.
  KVCacheEventManager* events = nullptr;
  SecondLevelOptions second_level = {};
  /// Number of sequences that keep states at the same time; 0 for an engine without states.
  std::int32_t num_state_slots = 0;
  /// Number of states that are kept so that later sequences can reuse the blocks before them. 0: an engine
  /// with states reuses no blocks.
  std::int32_t num_state_snapshots = 0;
};

/// Gives sequences their memory and takes it back: the one place that knows what a sequence keeps between
/// steps. It only does the bookkeeping; the engine owns the memory itself. Not thread-safe.
///
/// A sequence's memory is reserved, started from a reusable prefix, grown before each step, cut back to the
/// tokens that stay after it, forked, and released. Capacity is counted in KV blocks.
///
/// States: a running sequence holds a slot for them. They are saved before a step with drafts; if some are
/// wrong, the tokens of the step are computed again from the saved states. Blocks can be reused only up to a
/// snapshot of the states after them. Snapshots are taken at the end of a block: after the prompt's
/// last full block (without the last token, which is always computed), where a prompt stops to match another
/// one, before an adapter begins to act, and after the newest full block of generated tokens.
class SequenceMemoryPool {
 public:
  using Time = BlockPool::Time;

  /// Throws ConfigError for the reasons of BlockPool and CrossBlockPool.
  explicit SequenceMemoryPool(const SequenceMemoryOptions& options);

  /// Number of KV blocks; 0 if sequences keep no KV, so that each is computed in one step.
  [[nodiscard]] std::int32_t num_blocks() const { return block_pool_.num_blocks(); }
  [[nodiscard]] std::int32_t tokens_per_block() const { return block_pool_.tokens_per_block(); }
  /// Number of blocks that sequences can take now.
  [[nodiscard]] std::int32_t num_available() const { return block_pool_.num_available(); }
  /// Number of blocks of a sequence with `num_tokens` computed tokens.
  [[nodiscard]] std::int32_t blocks_for(std::int64_t num_tokens) const {
    return block_pool_.blocks_for(num_tokens);
  }
  /// Number of blocks of a sequence and its forks, each with `num_tokens` computed tokens, of which they
  /// share the first `num_shared_tokens`.
  [[nodiscard]] std::int64_t blocks_for_forks(std::int64_t num_tokens, std::int64_t num_shared_tokens,
                                              std::int32_t num_forks) const;
  /// Number of blocks that try_grow() would take.
  [[nodiscard]] std::int64_t blocks_to_grow(const SequenceMemory& memory, std::int64_t num_tokens) const;
  /// Number of blocks that try_fork() would take.
  [[nodiscard]] std::int32_t blocks_to_fork(const SequenceMemory& parent) const {
    return parent.num_computed % tokens_per_block() == 0 ? 0 : 1;
  }
  /// Number of tokens after the computed ones that the sequence's blocks hold, together with all available
  /// blocks except `num_reserved`.
  [[nodiscard]] std::int64_t room_after(const SequenceMemory& memory, std::int64_t num_reserved) const;

  /// Allocates the host memory for the tables of a sequence of up to `num_tokens` computed tokens, so that
  /// later calls do not allocate.
  void reserve(SequenceMemory& memory, std::int64_t num_tokens) const;
  /// Returns what reuse_prefix() would find in the pool. Changes nothing.
  [[nodiscard]] ReusablePrefix find_prefix(const SequenceContent& content) const;
  /// Starts an empty memory with the longest reusable prefix, from the pool and its second level; at least
  /// one token is left to compute. Returns the copy that must be made before the next step; kNoBlock twice if
  /// none is needed. `is_still_read` returns true for a block that an earlier copy, which is not made yet,
  /// reads.
  [[nodiscard]] BlockCopy reuse_prefix(SequenceMemory& memory, const SequenceContent& content,
                                       const std::function<bool(BlockId)>& is_still_read = {});
  /// Makes room for `num_tokens` computed tokens. Returns false, and changes nothing, if there are not enough
  /// blocks, or if there is no slot for the states of a new sequence.
  [[nodiscard]] bool try_grow(SequenceMemory& memory, std::int32_t num_tokens);
  /// Saves the states before a step that computes drafts; keep() forgets them. Returns false if there is no
  /// slot for them, true in engines without states.
  [[nodiscard]] bool try_save_states(SequenceMemory& memory);
  /// Records that a step has computed the tokens up to `num_tokens`, and after them `num_wrong` wrong drafts,
  /// whose KV the next step overwrites. States cannot leave tokens out: with wrong drafts, they become those
  /// before the step again, and the step's tokens count as not computed.
  void keep(SequenceMemory& memory, std::int32_t num_tokens, std::int32_t num_wrong = 0);
  /// Lets later sequences reuse what is computed of this one. May replace its blocks by others of the same
  /// content.
  void share(SequenceMemory& memory, const SequenceContent& content);
  /// Forks the computed tokens of `parent`, and its encoder input, to an empty memory. `copy` is the copy
  /// that must be made before the next step; kNoBlock twice if none is needed. Returns false, and changes
  /// nothing, if there are not enough blocks.
  [[nodiscard]] bool try_fork(const SequenceMemory& parent, SequenceMemory& child, BlockCopy& copy);
  /// Empties the memory of a sequence that ends, is preempted, or continues from another one. What it shares
  /// stays reusable until its blocks are evicted.
  void release(SequenceMemory& memory);

  [[nodiscard]] bool has_states() const { return state_pool_.has_value(); }
  /// Returns how many of the sequence's next tokens a step may compute so that it ends where a snapshot of
  /// the states is wanted; the largest number if none is.
  [[nodiscard]] std::int32_t tokens_to_snapshot(const SequenceMemory& memory,
                                                const SequenceContent& content) const;
  /// Copies of states that no step has made yet, in order; empty without states.
  [[nodiscard]] std::span<const StateCopy> state_copies() const {
    return has_states() ? state_pool_->copies() : std::span<const StateCopy>{};
  }
  /// Records that a step has made the copies of states. Call it before keep() and share().
  void commit_state_copies() {
    if (has_states()) state_pool_->commit_copies();
  }
  /// Forgets the copies of states that a failed step may not have made. The memories that await one must
  /// have been released.
  void fail_state_copies() {
    if (has_states()) state_pool_->fail_copies();
  }

  [[nodiscard]] bool has_encoder() const { return cross_pool_.has_value(); }
  /// True if reuse_encoder_input() would find the keys and values of this input.
  [[nodiscard]] bool can_reuse_encoder_input(const ReuseKey& key, const EncoderTokens& tokens) const {
    return cross_pool_->contains(key, tokens);
  }
  /// True if there is room for the keys and values of an input of `num_tokens` tokens.
  [[nodiscard]] bool has_encoder_room(std::int64_t num_tokens) const {
    return cross_pool_->blocks_for(num_tokens) <= cross_pool_->num_available();
  }
  /// Gives the sequence the keys and values of its input that another one has computed, or computes in the
  /// planned step. Returns false if there are none.
  [[nodiscard]] bool reuse_encoder_input(SequenceMemory& memory, const ReuseKey& key,
                                         const EncoderTokens& tokens);
  /// Gives the sequence blocks for the keys and values of its input, which the planned step must compute.
  /// has_encoder_room() must be true.
  void take_encoder_input(SequenceMemory& memory, const ReuseKey& key, const EncoderTokens& tokens);
  /// Records that the step that computes them has run.
  void commit_encoder_input(SequenceMemory& memory) { cross_pool_->commit(memory.cross); }

  /// See BlockPool::set_time.
  void set_time(Time now) { block_pool_.set_time(now); }
  /// Forgets what later sequences could reuse, between two steps: blocks, with the snapshots after them, and
  /// encoder inputs. What sequences hold stays theirs, but is no longer shared. The second level keeps its
  /// blocks.
  void reset_reuse();
  /// See BlockPool::offload_all.
  void offload_all(Time deadline) { block_pool_.offload_all(deadline); }
  [[nodiscard]] bool has_second_level() const { return block_pool_.has_second_level(); }

  /// The pools, for statistics and checks.
  [[nodiscard]] const BlockPool& block_pool() const { return block_pool_; }
  /// nullptr without an encoder.
  [[nodiscard]] const CrossBlockPool* cross_pool() const { return has_encoder() ? &*cross_pool_ : nullptr; }
  /// nullptr for an engine without states.
  [[nodiscard]] const StatePool* state_pool() const { return has_states() ? &*state_pool_ : nullptr; }

  /// Lists every violated invariant of the pools; empty if none. `held` are the memories of all sequences
  /// that hold any. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants(std::span<const SequenceMemory* const> held) const;
  /// The same for one of them, such as "has a block twice".
  [[nodiscard]] std::vector<std::string> check_invariants(const SequenceMemory& memory) const;
  /// The same for the copy that a sequence awaits.
  [[nodiscard]] std::vector<std::string> check_invariants(const SequenceMemory& memory,
                                                          const BlockCopy& copy) const;
  /// True if no other sequence holds the blocks of tokens [first, end).
  [[nodiscard]] bool may_write(const SequenceMemory& memory, std::int32_t first, std::int32_t end) const;

 private:
  /// Passes the retention settings for the shared blocks from `first` on to the pool.
  void retain_blocks(const SequenceMemory& memory, const SequenceContent& content, std::int32_t first);
  /// Gives the sequence a slot, if it has none, with the states after its reused blocks.
  void reuse_states(SequenceMemory& memory);
  /// Returns the number of tokens before the next snapshot that is wanted after `after` prompt tokens; the
  /// largest number if none is.
  [[nodiscard]] std::int32_t next_snapshot(const HeldStates& states, const SequenceContent& content,
                                           std::int32_t after) const;
  /// Takes a snapshot of the states after the computed tokens if one is wanted there.
  void take_snapshot(SequenceMemory& memory, const SequenceContent& content);

  std::optional<StatePool> state_pool_;  // nullopt without states; outlives the pool of blocks
  BlockPool block_pool_;
  std::optional<CrossBlockPool> cross_pool_;  // nullopt without an encoder
};

}  // namespace adaptrt
