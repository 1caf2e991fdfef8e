#include <stdexcept>
#include <string>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

void Scheduler::fork(Sequence& parent, Sequence& child) {
  if (parent.state != SequenceState::kRunning || child.state != SequenceState::kNew || parent.num_forks < 1 ||
      child.num_tokens() <= parent.num_computed) {
    throw std::logic_error("sequence " + std::to_string(child.id) + " cannot be forked now");
  }
  --parent.num_forks;
  child.arrival = parent.arrival;
  child.place = parent.place;
  child.num_charged = parent.num_computed;
  child.table.blocks.reserve(static_cast<std::size_t>(block_pool_.blocks_for(child.max_kv_tokens())));
  BlockCopy copy;
  if (!leaves_kept_blocks(parent) ||
      !block_pool_.try_fork(parent.table, parent.num_computed, child.table, copy)) {
    if (!may_pause() || child.is_beam) {
      throw std::logic_error("sequence " + std::to_string(child.id) +
                             " does not get the KV block promised to it");
    }
    pause(child);
    return;
  }
  child.num_computed = parent.num_computed;
  child.lease = parent.lease;
  child.cross = parent.cross;
  waiting_.add_running(child);
  run(child);
  if (copy.to != kNoBlock) copies_.push_back({.sequence = &child, .blocks = copy});
}

}  // namespace adaptrt
