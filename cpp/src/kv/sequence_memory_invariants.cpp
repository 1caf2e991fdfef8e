#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/kv/sequence_memory.h"

namespace adaptrt {

std::vector<std::string> SequenceMemoryPool::check_invariants(
    std::span<const SequenceMemory* const> held) const {
  std::vector<std::string> violations = block_pool_.check_invariants();
  std::vector<std::int32_t> num_users(static_cast<std::size_t>(num_blocks()), 0);
  std::set<const CrossBlocks*> inputs;
  std::size_t num_cross_blocks = 0;
  for (const SequenceMemory* memory : held) {
    for (const BlockId block : std::set(memory->blocks().begin(), memory->blocks().end())) {
      ++num_users[static_cast<std::size_t>(block)];
    }
    if (memory->cross && inputs.insert(memory->cross.get()).second) {
      num_cross_blocks += memory->cross->blocks().size();
    }
  }
  for (BlockId block = 0; block < num_blocks(); ++block) {
    const std::int32_t expected = num_users[static_cast<std::size_t>(block)];
    if (block_pool_.num_users(block) == expected) continue;
    violations.push_back("block " + std::to_string(block) + " counts " +
                         std::to_string(block_pool_.num_users(block)) + " users, but is in " +
                         std::to_string(expected) + " running sequences' tables");
  }
  const auto num_used = num_blocks() - std::ranges::count(num_users, 0);
  if (block_pool_.num_free() + block_pool_.num_cached() + num_used != num_blocks()) {
    violations.emplace_back("free, cached and used blocks are not all blocks");
  }
  if (state_pool_) {
    std::vector<StateSlot> slots;
    std::vector<StateSlot> saved;
    for (const SequenceMemory* memory : held) {
      if (memory->states.slot != kNoStateSlot) slots.push_back(memory->states.slot);
      if (memory->states.saved != kNoStateSlot) saved.push_back(memory->states.saved);
    }
    const auto of_states = state_pool_->check_invariants(slots, saved);
    violations.insert(violations.end(), of_states.begin(), of_states.end());
    for (BlockId block = 0; block < num_blocks(); ++block) {
      if (state_pool_->snapshot_after(block) == kNoStateSlot || block_pool_.is_indexed(block)) continue;
      violations.push_back("block " + std::to_string(block) + " has a snapshot and cannot be reused");
    }
    for (const StateCopy& copy : state_pool_->copies()) {
      if (copy.holder == nullptr) continue;
      const auto holder = std::ranges::find(held, copy.holder);
      if (holder == held.end() || (*holder)->states.slot != copy.to) {
        violations.emplace_back("a state is copied to a slot that its sequence does not hold");
      }
    }
  }
  if (!cross_pool_) return violations;
  const auto of_cross = cross_pool_->check_invariants();
  violations.insert(violations.end(), of_cross.begin(), of_cross.end());
  if (std::cmp_not_equal(num_cross_blocks, cross_pool_->num_blocks() - cross_pool_->num_available())) {
    violations.emplace_back("blocks of encoder inputs are used by no running sequence");
  }
  return violations;
}

std::vector<std::string> SequenceMemoryPool::check_invariants(const SequenceMemory& memory) const {
  std::vector<std::string> violations;
  const auto check = [&](bool holds, const char* violation) {
    if (!holds) violations.emplace_back(violation);
  };
  const std::set<BlockId> distinct(memory.blocks().begin(), memory.blocks().end());
  check(distinct.size() == memory.blocks().size(), "has a block twice");
  check(memory.num_blocks() >= blocks_for(memory.num_computed),
        "has a block table that does not cover its computed tokens");
  check(memory.table.num_indexed <= memory.num_blocks(), "has indexed more blocks than it has");
  check(memory.table.num_indexed * tokens_per_block() <= memory.num_computed,
        "has indexed blocks that are not computed");
  check(has_states() || memory.states.slot == kNoStateSlot, "has a slot for states, of which there are none");
  check(!has_states() || memory.num_computed == 0 || memory.states.slot != kNoStateSlot,
        "has computed tokens and no slot for their states");
  check(has_encoder() || memory.cross == nullptr, "has blocks for an encoder input, of which there are none");
  return violations;
}

std::vector<std::string> SequenceMemoryPool::check_invariants(const SequenceMemory& memory,
                                                              const BlockCopy& copy) const {
  std::vector<std::string> violations;
  const auto check = [&](bool holds, const char* violation) {
    if (!holds) violations.emplace_back(violation);
  };
  const auto next = static_cast<std::size_t>(memory.num_computed / tokens_per_block());
  check(next < memory.blocks().size() && memory.blocks()[next] == copy.to,
        "awaits a copy to a block that it does not write next");
  check(block_pool_.num_users(copy.to) == 1, "awaits a copy to a block that it shares");
  check(copy.from != copy.to, "awaits a copy of a block to itself");
  return violations;
}

bool SequenceMemoryPool::may_write(const SequenceMemory& memory, std::int32_t first, std::int32_t end) const {
  const auto& blocks = memory.blocks();
  const auto last = std::min(blocks.size(), static_cast<std::size_t>(blocks_for(end)));
  for (auto i = static_cast<std::size_t>(first / tokens_per_block()); i < last; ++i) {
    if (block_pool_.num_users(blocks[i]) != 1) return false;
  }
  return true;
}

}  // namespace adaptrt
