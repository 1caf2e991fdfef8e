#include <stdexcept>
#include <string>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

void Scheduler::fork(Sequence& parent, Sequence& child) {
  if (parent.state != SequenceState::kRunning || child.state != SequenceState::kNew || parent.num_forks < 1 ||
      child.num_tokens() <= parent.num_computed()) {
    throw std::logic_error("sequence " + std::to_string(child.id) + " cannot be forked now");
  }
  --parent.num_forks;
  child.arrival = parent.arrival;
  child.place = parent.place;
  child.num_charged = parent.num_computed();
  memory_.reserve(child.memory, child.max_computed_tokens());
  BlockCopy copy;
  if (!leaves_reserved_blocks(parent) || !memory_.try_fork(parent.memory, child.memory, copy)) {
    if (!may_preempt() || child.is_beam) {
      throw std::logic_error("sequence " + std::to_string(child.id) +
                             " does not get the KV block promised to it");
    }
    preempt(child);
    return;
  }
  child.lease = parent.lease;
  waiting_.add_running(child);
  run(child);
  add_copy(child, copy);
}

void Scheduler::add_copy(Sequence& sequence, const BlockCopy& copy) {
  if (copy.to != kNoBlock) copies_.push_back({.sequence = &sequence, .blocks = copy});
}

}  // namespace adaptrt
