#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/kv/second_level.h"

namespace adaptrt {

struct SequenceMemory;

/// Number of a slot for the states of one sequence.
using StateSlot = std::int32_t;
inline constexpr StateSlot kNoStateSlot = -1;

/// Copy of one slot's states to another slot, to be made before a step writes anything.
struct StateCopy {
  StateSlot from = kNoStateSlot;
  StateSlot to = kNoStateSlot;
  /// The memory that continues with the copy; nullptr if the copy is a snapshot or saves states.
  const SequenceMemory* holder = nullptr;

  bool operator==(const StateCopy&) const = default;
};

/// Counters start when the pool is made.
struct StatePoolStats {
  std::int64_t slot_bytes = 0;     ///< bytes of the states of one sequence; the pool's owner fills it in
  std::int64_t num_slots = 0;      ///< slots of sequences
  std::int64_t used_slots = 0;     ///< slots of running sequences
  std::int64_t max_snapshots = 0;  ///< slots of snapshots
  std::int64_t num_snapshots = 0;
  std::int64_t taken_snapshots = 0;
  std::int64_t reused_snapshots = 0;
  /// The file of snapshots; nullopt if there is none. The pool's owner fills it in.
  std::optional<SecondLevelStats> second_level = std::nullopt;

  bool operator==(const StatePoolStats&) const = default;
};

/// Bookkeeping of the slots for states. A running sequence holds one slot. A snapshot holds another: the
/// states after the tokens of a KV block, and of the blocks before it. A later sequence can reuse these
/// blocks only together with the snapshot. The engine owns the memory.
///
/// Slots [0, num_sequences) are for sequences, the others for snapshots. If a new snapshot finds no free
/// slot, it replaces the least recently used one. States that are saved for one step take such a slot too.
class StatePool {
 public:
  /// `num_blocks`: number of KV blocks. Throws ConfigError unless there is at least one sequence, and if
  /// another number is negative.
  StatePool(std::int32_t num_sequences, std::int32_t num_snapshots, std::int32_t num_blocks);

  [[nodiscard]] std::int32_t num_sequences() const { return num_sequences_; }
  [[nodiscard]] std::int32_t num_snapshots() const { return num_snapshots_; }
  [[nodiscard]] bool has_free() const { return !free_.empty(); }

  /// Takes a slot for a sequence; has_free() must be true.
  [[nodiscard]] StateSlot take();
  /// Gives the slot of a sequence back. Copies from it are still made.
  void give_back(StateSlot slot);
  /// Plans a copy to the slot of `holder`.
  void copy(StateSlot from, StateSlot to, const SequenceMemory& holder);

  /// Plans a snapshot of the states in `from`, which are those after `block`. Does nothing if the block has
  /// one, or if every snapshot takes part in a planned copy. Returns true if a snapshot was taken.
  bool take_snapshot(BlockId block, StateSlot from);
  /// Returns the block's snapshot, kNoStateSlot if it has none.
  [[nodiscard]] StateSlot snapshot_after(BlockId block) const {
    return snapshots_[static_cast<std::size_t>(block)];
  }
  /// Plans a copy of the block's snapshot to the slot of `holder`, instead of the copy that it awaits.
  void reuse_snapshot(BlockId block, StateSlot to, const SequenceMemory& holder);
  /// Drops the block's snapshot if it has one.
  void drop_snapshot(BlockId block);
  /// Sets what is called with a block before another snapshot replaces its own.
  void before_replacement(std::function<void(BlockId)> call) { before_replacement_ = std::move(call); }
  /// Returns the slot that holds the block's snapshot now, before the planned copies; the block must have
  /// one.
  [[nodiscard]] StateSlot place_of_snapshot(BlockId block) const;

  /// Takes a slot, whose states the caller then writes, for the snapshot of a block that is not known yet.
  /// Returns kNoStateSlot if there is none.
  [[nodiscard]] StateSlot begin_snapshot() { return take_snapshot_slot(); }
  /// Makes the slot the snapshot of `block`, which has none.
  void end_snapshot(StateSlot slot, BlockId block);
  /// Gives the slot back instead.
  void cancel_snapshot(StateSlot slot) { free_snapshot_slot(slot); }

  /// Plans a copy of the states in `from` to a slot that is held until restore() or drop_saved(). Returns
  /// kNoStateSlot if there is none: every snapshot takes part in a planned copy, or there are no snapshots.
  [[nodiscard]] StateSlot save(StateSlot from);
  /// Plans a copy of saved states to the slot of `holder`. Their own slot is free afterwards.
  void restore(StateSlot saved, StateSlot to, const SequenceMemory& holder);
  /// Frees the slot of saved states.
  void drop_saved(StateSlot saved);

  /// Copies that no step has made yet, in the order in which they must be made.
  [[nodiscard]] std::span<const StateCopy> copies() const { return copies_; }
  /// Records that a step has made all copies.
  void commit_copies();
  /// Handles a failed step: drops the snapshots whose copies may not have been made. Sequences that await a
  /// copy must have given their slots back.
  void fail_copies();

  [[nodiscard]] StatePoolStats stats() const;
  /// Lists every violated invariant; empty if none. `held` and `saved`: slots of all running sequences, and
  /// those of their saved states. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants(std::span<const StateSlot> held,
                                                          std::span<const StateSlot> saved = {}) const;

 private:
  [[nodiscard]] std::size_t place_of(StateSlot snapshot) const {
    return static_cast<std::size_t>(snapshot - num_sequences_);
  }
  [[nodiscard]] bool is_read_later(StateSlot slot) const;
  [[nodiscard]] bool has_copy(StateSlot slot) const;
  /// Returns a slot for a new snapshot; kNoStateSlot if there is none.
  [[nodiscard]] StateSlot take_snapshot_slot();
  /// Frees the slot of a snapshot or of saved states, once no planned copy reads it any more.
  void free_snapshot_slot(StateSlot slot);

  std::int32_t num_sequences_;
  std::int32_t num_snapshots_;
  std::vector<StateSlot> free_;            // slots of sequences
  std::vector<StateSlot> free_snapshots_;  // slots of snapshots
  /// Slots of dropped snapshots that a planned copy still reads; free after the copies.
  std::vector<StateSlot> read_once_more_;
  std::vector<StateSlot> snapshots_;     // [num_blocks]
  std::vector<BlockId> blocks_;          // [num_snapshots], kNoBlock for unused slots
  std::vector<std::uint64_t> last_use_;  // [num_snapshots]
  std::uint64_t num_uses_ = 0;
  std::function<void(BlockId)> before_replacement_ = [](BlockId) {};
  std::vector<StateCopy> copies_;
  std::int32_t num_saved_ = 0;
  std::int64_t taken_snapshots_ = 0;
  std::int64_t reused_snapshots_ = 0;
};

}  // namespace adaptrt
