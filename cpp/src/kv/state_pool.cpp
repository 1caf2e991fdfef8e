#include "adaptrt/kv/state_pool.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

StatePool::StatePool(std::int32_t num_sequences, std::int32_t num_snapshots, std::int32_t num_blocks)
    : num_sequences_(num_sequences), num_snapshots_(num_snapshots) {
  if (num_sequences < 1 || num_snapshots < 0 || num_blocks < 0) {
    throw ConfigError("a pool of states has " + std::to_string(num_sequences) + " sequences, " +
                      std::to_string(num_snapshots) + " snapshots and " + std::to_string(num_blocks) +
                      " KV blocks; expected at least one sequence, and no negative number");
  }
  // In reverse order, so that the lowest slots are used first.
  for (StateSlot slot = num_sequences - 1; slot >= 0; --slot) free_.push_back(slot);
  for (StateSlot slot = num_sequences + num_snapshots - 1; slot >= num_sequences; --slot) {
    free_snapshots_.push_back(slot);
  }
  read_once_more_.reserve(static_cast<std::size_t>(num_snapshots));
  snapshots_.resize(static_cast<std::size_t>(num_blocks), kNoStateSlot);
  blocks_.resize(static_cast<std::size_t>(num_snapshots), kNoBlock);
  last_use_.resize(static_cast<std::size_t>(num_snapshots));
  copies_.reserve(static_cast<std::size_t>(num_sequences) + static_cast<std::size_t>(num_snapshots));
}

StateSlot StatePool::take() {
  if (free_.empty()) throw std::logic_error("more sequences run than there are slots for states");
  const StateSlot slot = free_.back();
  free_.pop_back();
  return slot;
}

void StatePool::give_back(StateSlot slot) {
  std::erase_if(copies_, [&](const StateCopy& copy) { return copy.to == slot; });
  free_.push_back(slot);
}

void StatePool::copy(StateSlot from, StateSlot to, const SequenceMemory& holder) {
  copies_.push_back({.from = from, .to = to, .holder = &holder});
}

bool StatePool::take_snapshot(BlockId block, StateSlot from) {
  StateSlot& snapshot = snapshots_[static_cast<std::size_t>(block)];
  if (snapshot == kNoStateSlot) {
    snapshot = take_snapshot_slot();
    if (snapshot == kNoStateSlot) return false;
    blocks_[place_of(snapshot)] = block;
    copies_.push_back({.from = from, .to = snapshot});
    last_use_[place_of(snapshot)] = ++num_uses_;
    ++taken_snapshots_;
    return true;
  }
  last_use_[place_of(snapshot)] = ++num_uses_;
  return false;
}

StateSlot StatePool::take_snapshot_slot() {
  if (free_snapshots_.empty()) {
    StateSlot oldest = kNoStateSlot;
    for (StateSlot slot = num_sequences_; slot < num_sequences_ + num_snapshots_; ++slot) {
      if (blocks_[place_of(slot)] == kNoBlock || has_copy(slot)) continue;
      if (oldest == kNoStateSlot || last_use_[place_of(slot)] < last_use_[place_of(oldest)]) oldest = slot;
    }
    if (oldest == kNoStateSlot) return kNoStateSlot;
    before_replacement_(blocks_[place_of(oldest)]);
    drop_snapshot(blocks_[place_of(oldest)]);
  }
  const StateSlot slot = free_snapshots_.back();
  free_snapshots_.pop_back();
  return slot;
}

void StatePool::reuse_snapshot(BlockId block, StateSlot to, const SequenceMemory& holder) {
  const StateSlot snapshot = snapshot_after(block);
  last_use_[place_of(snapshot)] = ++num_uses_;
  // A sequence may have found a later snapshot than the one it awaits.
  const bool awaits_other = std::erase_if(copies_, [&](const StateCopy& copy) { return copy.to == to; }) > 0;
  if (!awaits_other) ++reused_snapshots_;
  copy(snapshot, to, holder);
}

void StatePool::drop_snapshot(BlockId block) {
  const StateSlot slot = std::exchange(snapshots_[static_cast<std::size_t>(block)], kNoStateSlot);
  if (slot == kNoStateSlot) return;
  blocks_[place_of(slot)] = kNoBlock;
  free_snapshot_slot(slot);
}

void StatePool::free_snapshot_slot(StateSlot slot) {
  if (is_read_later(slot)) {
    read_once_more_.push_back(slot);
    return;
  }
  std::erase_if(copies_, [&](const StateCopy& copy) { return copy.to == slot; });
  free_snapshots_.push_back(slot);
}

StateSlot StatePool::place_of_snapshot(BlockId block) const {
  StateSlot slot = snapshot_after(block);
  for (auto copy = copies_.rbegin(); copy != copies_.rend(); ++copy) {
    if (copy->to == slot) slot = copy->from;
  }
  return slot;
}

void StatePool::end_snapshot(StateSlot slot, BlockId block) {
  snapshots_[static_cast<std::size_t>(block)] = slot;
  blocks_[place_of(slot)] = block;
  last_use_[place_of(slot)] = ++num_uses_;
}

StateSlot StatePool::save(StateSlot from) {
  const StateSlot saved = take_snapshot_slot();
  if (saved == kNoStateSlot) return saved;
  copies_.push_back({.from = from, .to = saved});
  ++num_saved_;
  return saved;
}

void StatePool::restore(StateSlot saved, StateSlot to, const SequenceMemory& holder) {
  copy(saved, to, holder);
  drop_saved(saved);
}

void StatePool::drop_saved(StateSlot saved) {
  --num_saved_;
  free_snapshot_slot(saved);
}

bool StatePool::is_read_later(StateSlot slot) const {
  return std::ranges::find(copies_, slot, &StateCopy::from) != copies_.end();
}

bool StatePool::has_copy(StateSlot slot) const {
  return is_read_later(slot) || std::ranges::find(copies_, slot, &StateCopy::to) != copies_.end();
}

void StatePool::commit_copies() {
  copies_.clear();
  free_snapshots_.insert(free_snapshots_.end(), read_once_more_.begin(), read_once_more_.end());
  read_once_more_.clear();
}

void StatePool::fail_copies() {
  while (!copies_.empty()) {
    const StateCopy copy = copies_.back();
    copies_.pop_back();
    if (copy.holder != nullptr) throw std::logic_error("a sequence awaits a copy that a failed step lost");
    const BlockId block = blocks_[place_of(copy.to)];
    if (block != kNoBlock) drop_snapshot(block);
  }
  commit_copies();
}

StatePoolStats StatePool::stats() const {
  return {.slot_bytes = 0,
          .num_slots = num_sequences_,
          .used_slots = num_sequences_ - std::ssize(free_),
          .max_snapshots = num_snapshots_,
          .num_snapshots =
              num_snapshots_ - std::ssize(free_snapshots_) - std::ssize(read_once_more_) - num_saved_,
          .taken_snapshots = taken_snapshots_,
          .reused_snapshots = reused_snapshots_};
}

std::vector<std::string> StatePool::check_invariants(std::span<const StateSlot> held,
                                                     std::span<const StateSlot> saved) const {
  std::vector<std::string> violations;
  std::vector<int> uses(static_cast<std::size_t>(num_sequences_ + num_snapshots_), 0);
  const auto count = [&](std::span<const StateSlot> slots, StateSlot first, StateSlot end) {
    for (const StateSlot slot : slots) {
      if (slot < first || slot >= end) {
        violations.push_back("state slot " + std::to_string(slot) + " is not in its part of the slots");
      } else {
        ++uses[static_cast<std::size_t>(slot)];
      }
    }
  };
  const StateSlot end = num_sequences_ + num_snapshots_;
  count(held, 0, num_sequences_);
  count(saved, num_sequences_, end);
  count(free_, 0, num_sequences_);
  count(free_snapshots_, num_sequences_, end);
  count(read_once_more_, num_sequences_, end);
  for (std::size_t block = 0; block < snapshots_.size(); ++block) {
    if (snapshots_[block] == kNoStateSlot) continue;
    count(std::span(&snapshots_[block], 1), num_sequences_, end);
    if (!std::cmp_equal(blocks_[place_of(snapshots_[block])], block)) {
      violations.push_back("the snapshot of block " + std::to_string(block) + " is another block's");
    }
  }
  for (std::size_t slot = 0; slot < uses.size(); ++slot) {
    if (uses[slot] == 1) continue;
    violations.push_back("state slot " + std::to_string(slot) + " has " + std::to_string(uses[slot]) +
                         " uses; expected one of free, held, snapshot");
  }
  if (std::cmp_not_equal(saved.size(), num_saved_)) {
    violations.push_back(std::to_string(num_saved_) + " states are saved, and sequences hold " +
                         std::to_string(saved.size()));
  }
  std::set<StateSlot> targets;
  for (const StateCopy& copy : copies_) {
    if (copy.from == copy.to) violations.emplace_back("a state is copied to itself");
    if (!targets.insert(copy.to).second) violations.emplace_back("two states are copied to one slot");
    if ((copy.holder == nullptr) != (copy.to >= num_sequences_)) {
      violations.emplace_back("a state is copied to a slot of the other part");
    }
  }
  return violations;
}

}  // namespace adaptrt
