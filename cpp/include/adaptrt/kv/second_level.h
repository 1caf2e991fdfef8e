#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/sha256.h"
#include "adaptrt/kv/reuse_key.h"

namespace adaptrt {

/// Index of a block in the engine's KV pool.
using BlockId = std::int32_t;
inline constexpr BlockId kNoBlock = -1;

/// Identity of a block's content, the same in every process: a digest of the engine, the adapter's weights,
/// the cache salt, and all tokens up to the block's end.
using BlockKey = Sha256Digest;

/// Returns the parent key of a prompt's first block. `fingerprint` is SecondLevel::fingerprint().
[[nodiscard]] BlockKey root_key(const Sha256Digest& fingerprint, const ReuseKey& key);
/// Returns the parent key of a block whose `key` differs from the key of the previous block, because an
/// adapter becomes active there.
[[nodiscard]] BlockKey change_key(const BlockKey& before, const Sha256Digest& fingerprint,
                                  const ReuseKey& key);
/// Returns the key of the block with these tokens. `before` is the key of the previous block, a root_key() or
/// a change_key().
[[nodiscard]] BlockKey block_key(const BlockKey& before, std::span<const std::int32_t> tokens);

/// A block's identity in the second level.
struct KeyedBlock {
  BlockKey key;
  std::span<const std::int32_t> tokens;  ///< [tokens_per_block]
};

/// Counters start when the level is made.
struct SecondLevelStats {
  std::int64_t max_num_blocks = 0;
  std::int64_t used_num_blocks = 0;
  std::int64_t written_blocks = 0;
  std::int64_t read_blocks = 0;     ///< read and used instead of being computed
  std::int64_t dropped_blocks = 0;  ///< not written for lack of room or time
  std::int64_t failed_blocks = 0;   ///< damaged, or lost to errors
  /// Reason why the level was switched off; empty: it is in use.
  std::string error = {};

  bool operator==(const SecondLevelStats&) const = default;
};

/// A BlockPool copies the blocks that it evicts to this level, and looks here for blocks that it lacks. The
/// level holds only copies, so an error loses a block and nothing else. Only one thread may call it.
class SecondLevel {
 public:
  using Time = std::chrono::steady_clock::time_point;

  virtual ~SecondLevel() = default;
  /// Digest of everything that determines KV and is not in ReuseKey.
  [[nodiscard]] virtual const Sha256Digest& fingerprint() const = 0;
  [[nodiscard]] virtual SecondLevelStats stats() const = 0;

  /// Marks the start of a step's planning: the step gets a new time limit for reads.
  virtual void begin_step() = 0;

  /// Copies a block of the pool, which may be overwritten afterwards. Returns false if the copy is not kept.
  /// `event_hash` is given if an event reported the block; take_lost_event() then reports its loss.
  [[nodiscard]] virtual bool offload(BlockId block, const KeyedBlock& content,
                                     std::optional<std::uint64_t> event_hash) = 0;
  /// Announces that no more steps follow and that at most `num_blocks` blocks will be offloaded, the most
  /// important first.
  virtual void begin_closing(std::int64_t num_blocks) = 0;
  /// Waits until offload() has room. Returns false if the deadline passes first or the level accepts no more
  /// blocks.
  [[nodiscard]] virtual bool await_room(Time deadline) = 0;
  /// Waits until all offloaded blocks are written, or the deadline passes.
  virtual void await_writes(Time deadline) = 0;

  [[nodiscard]] virtual bool contains(const BlockKey& key) = 0;
  /// Starts to read blocks that contains() has found. read_next() returns them in this order.
  virtual void begin_reads(std::span<const KeyedBlock> blocks) = 0;
  /// Waits for the next of these blocks and writes it to `block` of the pool. Returns false if it is damaged,
  /// late or lost.
  [[nodiscard]] virtual bool read_next(BlockId block) = 0;
  /// Cancels the reads whose blocks were not taken.
  virtual void end_reads() = 0;

  /// Cancels the event for the loss of this block, because the pool has it again. Returns true if there would
  /// have been such an event.
  [[nodiscard]] virtual bool take_back_event(const BlockKey& key) = 0;
  /// Returns the hash of the next lost block that an event had reported; nullopt: there are no more.
  [[nodiscard]] virtual std::optional<std::uint64_t> take_lost_event() = 0;

  /// Lists every violated invariant; empty if none. For tests, between steps.
  [[nodiscard]] virtual std::vector<std::string> check_invariants() const = 0;
};

}  // namespace adaptrt
