// Beams: the sequences of a search. After each step some are given up and continue from others.

#include <algorithm>
#include <stdexcept>
#include <string>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

void Scheduler::move_beams(std::span<const BeamMove> moves) {
  const auto may_move = [](const Sequence& sequence) {
    return sequence.is_beam && sequence.state == SequenceState::kRunning;
  };
  for (const auto& [from, to] : moves) {
    if (!may_move(*from) || !may_move(*to) || std::ranges::find(moves, from, &BeamMove::to) != moves.end()) {
      throw std::logic_error("a beam of sequence " + std::to_string(to->id) + " cannot be moved now");
    }
  }
  // A beam whose tokens do not end at a block boundary releases one block of its own; only such a beam needs
  // one.
  for (const auto& [from, to] : moves) block_pool_.release(to->table);
  for (const auto& [from, to] : moves) {
    BlockCopy copy;
    if (!block_pool_.try_fork(from->table, from->num_computed, to->table, copy)) {
      throw std::logic_error("a beam of sequence " + std::to_string(to->id) +
                             " does not get the KV block that it gave back");
    }
    to->num_computed = from->num_computed;
    if (copy.to != kNoBlock) copies_.push_back({.sequence = to, .blocks = copy});
  }
}

std::int64_t Scheduler::num_kept_blocks() const {
  std::int64_t kept = 0;
  for (const Sequence* sequence : running_) kept += kept_for(*sequence);
  return kept;
}

std::int64_t Scheduler::kept_for(const Sequence& sequence) const {
  if (!sequence.is_beam) return 0;
  return blocks_wanted(sequence) - static_cast<std::int64_t>(sequence.table.blocks.size());
}

bool Scheduler::leaves_kept_blocks(const Sequence& parent) const {
  if (!may_pause() || parent.is_beam) return true;
  const bool needs_none = parent.num_computed % block_pool_.tokens_per_block() == 0;
  return needs_none || block_pool_.num_available() > num_kept_blocks();
}

Sequence& Scheduler::next_to_pause() const {
  return **std::ranges::find_if(running_.rbegin(), running_.rend(),
                                [](const Sequence* sequence) { return !sequence->is_beam; });
}

}  // namespace adaptrt
