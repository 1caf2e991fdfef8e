#include <stdexcept>
#include <utility>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

void Scheduler::fork(Sequence& parent, Sequence& child) {
  if (parent.state != SequenceState::kRunning || child.state != SequenceState::kNew || parent.num_forks < 1 ||
      child.num_tokens() <= parent.num_computed) {
    throw std::logic_error("sequence " + std::to_string(child.id) + " cannot be forked now");
  }
  --parent.num_forks;
  child.arrival = parent.arrival;
  child.table.blocks.reserve(static_cast<std::size_t>(block_pool_.blocks_for(child.max_kv_tokens())));
  BlockCopy copy;
  if (!block_pool_.try_fork(parent.table, parent.num_computed, child.table, copy)) {
    if (!may_pause()) {
      throw std::logic_error("sequence " + std::to_string(child.id) +
                             " does not get the KV block promised to it");
    }
    pause(child);
    return;
  }
  child.num_computed = parent.num_computed;
  child.lease = parent.lease;
  run(child);
  if (copy.to != kNoBlock) copies_.push_back({.sequence = &child, .blocks = copy});
}

std::int32_t Scheduler::num_promised_forks() const {
  std::int32_t promised = 0;
  for (const Sequence* sequence : running_) promised += sequence->num_forks;
  return promised;
}

}  // namespace adaptrt
