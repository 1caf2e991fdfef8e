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

/// Identity of a block's content, the same in every process: of the engine, the adapter's weights, the cache
/// salt, and all tokens up to the block's end.
using BlockKey = Sha256Digest;

/// What the key of a prompt's first block is made from. `fingerprint` is SecondLevel::fingerprint().
[[nodiscard]] BlockKey root_key(const Sha256Digest& fingerprint, const ReuseKey& key);
/// What takes the place of the key of the block before where `key` is another than that block's: an adapter
/// begins to act.
[[nodiscard]] BlockKey change_key(const BlockKey& before, const Sha256Digest& fingerprint,
                                  const ReuseKey& key);
/// Of the block with these tokens behind the block `before`, or behind a root_key().
[[nodiscard]] BlockKey block_key(const BlockKey& before, std::span<const std::int32_t> tokens);

/// A block as the second level knows it.
struct KeyedBlock {
  BlockKey key;
  std::span<const std::int32_t> tokens;  ///< [tokens_per_block]
};

/// Counters run since the level was made.
struct SecondLevelStats {
  std::int64_t max_num_blocks = 0;
  std::int64_t used_num_blocks = 0;
  std::int64_t written_blocks = 0;
  std::int64_t read_blocks = 0;     ///< were used instead of being computed
  std::int64_t dropped_blocks = 0;  ///< were not written, for want of room or time
  std::int64_t failed_blocks = 0;   ///< were lost to errors, or damaged
  /// Why the level was given up; empty: it was not.
  std::string error = {};

  bool operator==(const SecondLevelStats&) const = default;
};

/// Where a BlockPool puts blocks that it evicts, and looks for blocks that it lacks. What it holds is a copy:
/// nothing depends on a block being there, and whatever goes wrong costs the block. One thread calls it.
class SecondLevel {
 public:
  using Time = std::chrono::steady_clock::time_point;

  virtual ~SecondLevel() = default;
  /// Of all that KV depends on besides what ReuseKey has.
  [[nodiscard]] virtual const Sha256Digest& fingerprint() const = 0;
  [[nodiscard]] virtual SecondLevelStats stats() const = 0;

  /// A step is planned: reads may take their time anew.
  virtual void begin_step() = 0;

  /// Takes a copy of a block of the pool, which may be overwritten when this returns. False: it is not kept.
  /// With `event_hash`, an event has told of the block, or is about to: take_lost_event() tells of its loss.
  [[nodiscard]] virtual bool offload(BlockId block, const KeyedBlock& content,
                                     std::optional<std::uint64_t> event_hash) = 0;
  /// So many blocks are offloaded from now on at most, and no steps follow: the most wanted comes first.
  virtual void begin_closing(std::int64_t num_blocks) = 0;
  /// Waits until offload() has room; false when the time is over before, or when it takes no more blocks.
  [[nodiscard]] virtual bool await_room(Time deadline) = 0;
  /// Waits until all that was offloaded is written, or the time is over.
  virtual void await_writes(Time deadline) = 0;

  [[nodiscard]] virtual bool contains(const BlockKey& key) = 0;
  /// Asks for blocks that contains() has found, to be taken in this order.
  virtual void begin_reads(std::span<const KeyedBlock> blocks) = 0;
  /// Waits for the next of them and writes it to a block of the pool. False when it is damaged, late or lost.
  [[nodiscard]] virtual bool read_next(BlockId block) = 0;
  /// Whatever was not taken is not wanted any more.
  virtual void end_reads() = 0;

  /// The block is in the pool again: no event is to tell of its loss here. True: one would have.
  [[nodiscard]] virtual bool take_back_event(const BlockKey& key) = 0;
  /// One after the other, the hashes of blocks that events have told of and that are lost; nullopt: no more.
  [[nodiscard]] virtual std::optional<std::uint64_t> take_lost_event() = 0;

  /// Everything that does not hold; empty when all is well. For tests, between steps.
  [[nodiscard]] virtual std::vector<std::string> check_invariants() const = 0;
};

}  // namespace adaptrt
