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
  for (const auto& [from, to] : moves) memory_.release(to->memory);
  for (const auto& [from, to] : moves) {
    BlockCopy copy;
    if (!memory_.try_fork(from->memory, to->memory, copy)) {
      throw std::logic_error("a beam of sequence " + std::to_string(to->id) +
                             " does not get the KV block that it gave back");
    }
    add_copy(*to, copy);
  }
}

std::int64_t Scheduler::num_reserved_blocks() const {
  std::int64_t reserved = 0;
  for (const Sequence* sequence : running_) reserved += reserved_for(*sequence);
  return reserved;
}

std::int64_t Scheduler::reserved_for(const Sequence& sequence) const {
  if (!sequence.is_beam) return 0;
  return blocks_wanted(sequence) - sequence.memory.num_blocks();
}

bool Scheduler::leaves_reserved_blocks(const Sequence& parent) const {
  if (!may_preempt() || parent.is_beam) return true;
  return memory_.num_available() - num_reserved_blocks() >= memory_.blocks_to_fork(parent.memory);
}

Sequence& Scheduler::next_to_preempt() const {
  return **std::ranges::find_if(running_.rbegin(), running_.rend(),
                                [](const Sequence* sequence) { return !sequence->is_beam; });
}

}  // namespace adaptrt
