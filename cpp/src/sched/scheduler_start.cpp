// Starts waiting sequences and finds the memory that they can reuse.

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

namespace {

/// Maximum number of waiting sequences without their adapter that one plan skips, so that planning stays
/// cheap for a long queue.
constexpr std::size_t kMostSkippedInAPlan = 256;

bool has_failed(const Sequence& sequence, const StepPlan& plan) {
  return std::ranges::find(plan.failed, &sequence, &FailedStart::sequence) != plan.failed.end();
}

}  // namespace

void Scheduler::collect_failed_loads(StepPlan& plan) const {
  for (const LoadFailure& failure : lora_cache_->take_load_failures()) {
    for (Sequence* sequence : waiting_.list()) {
      if (sequence->adapter && sequence->adapter->generation() == failure.generation) {
        plan.failed.push_back({sequence, failure.reason});
      }
    }
  }
}

bool Scheduler::is_full(const StepPlan& plan) const {
  return std::cmp_greater_equal(running_.size(), limits_.max_batch_size) || tokens_left(plan) == 0;
}

void Scheduler::start_waiting(StepPlan& plan, bool may_start) {
  skipped_.clear();
  may_lease_ = true;
  num_loading_ = 0;
  std::size_t num_waiting = 0;  // among the sequences visited
  WaitingQueue::Walk walk(waiting_);
  for (;;) {
    if (is_full(plan)) may_start = false;
    if (!may_start && (!looks_ahead() || std::cmp_greater_equal(num_waiting, limits_.max_batch_size))) return;
    if (num_waiting == kMostSkippedInAPlan) return;
    Sequence* const next = walk.next();
    if (next == nullptr) return;
    Sequence& sequence = *next;
    if (has_failed(sequence, plan)) continue;
    ++num_waiting;
    const AdapterReadiness readiness = ensure_adapter(sequence);
    if (readiness != AdapterReadiness::kReady) {
      skip(sequence, readiness, plan);
      if (may_start && readiness != AdapterReadiness::kLoading) plan.awaits_adapter_room = true;
      continue;
    }
    if (!may_start) continue;
    switch (try_start(sequence, plan)) {
      case StartResult::kStarted:
        --num_waiting;
        if (!sequence.adapter) break;
        for (Sequence* skipped : skipped_) ++skipped->times_skipped;
        break;
      case StartResult::kNoRoom:
        may_start = false;
        break;
      case StartResult::kSkipped:
      case StartResult::kFailed:
        break;
    }
  }
}

bool Scheduler::next_are_loading(const StepPlan& plan) {
  bool loading = false;
  std::int32_t num_next = 0;
  may_lease_ = true;
  num_loading_ = 0;
  WaitingQueue::Walk walk(waiting_);
  while (num_next++ < limits_.max_batch_size) {
    const Sequence* const sequence = walk.next();
    if (sequence == nullptr) break;
    if (has_failed(*sequence, plan)) continue;
    loading = ensure_adapter(*sequence) == AdapterReadiness::kLoading || loading;
  }
  return loading;
}

AdapterReadiness Scheduler::ensure_adapter(const Sequence& sequence) {
  if (!sequence.adapter) return AdapterReadiness::kReady;
  if (!may_lease_) return AdapterReadiness::kAwaitsOthers;
  return lora_cache_->ensure(*sequence.adapter, turn_, num_loading_ < limits_.max_batch_size);
}

void Scheduler::skip(Sequence& sequence, AdapterReadiness readiness, StepPlan& plan) {
  using enum AdapterReadiness;
  if (readiness == kLoading || readiness == kAwaitsLoads) plan.awaits_loads = true;
  if (readiness == kLoading) {
    ++num_loading_;
    return;
  }
  if (readiness == kNoRoom && !any_lease()) plan.unservable.push_back(&sequence);
  skipped_.push_back(&sequence);
  if (sequence.times_skipped >= limits_.max_times_skipped) may_lease_ = false;
}

Scheduler::StartResult Scheduler::try_start(Sequence& sequence, StepPlan& plan) {
  ReusablePrefix prefix;
  if (starts_from_shared_memory(sequence)) prefix = memory_.find_prefix(sequence.content());
  const std::int32_t to_compute = sequence.num_tokens() - prefix.num_tokens;
  const bool may_split = !computes_sequences_whole() &&
                         (limits_.enable_chunked_context || sequence.num_tokens() > limits_.max_num_tokens);
  if (to_compute > tokens_left(plan) && !may_split) return StartResult::kNoRoom;
  if (least_from(sequence, prefix.num_tokens) > tokens_left(plan)) return StartResult::kNoRoom;
  if (std::cmp_greater(running_.size() + 1,
                       limits_.max_batch_size - num_promised_forks() - sequence.num_forks))
    return StartResult::kNoRoom;

  if (!has_encoder_room(sequence, plan)) return StartResult::kNoRoom;
  std::int64_t needed = blocks_wanted(sequence) - prefix.num_blocks;
  // If preemption is allowed, reserve one more block for each sequence. Otherwise its first generated token
  // could preempt one at once.
  if (may_preempt() && !sequence.is_beam && !running_.empty() && !computes_sequences_whole()) {
    needed += 1 + sequence.num_forks;
  }
  const std::int64_t available = std::int64_t{memory_.num_available()} - prefix.num_unused_blocks;
  if (needed > available - num_promised_blocks()) return StartResult::kNoRoom;

  std::optional<DeviceLease> lease;
  while (sequence.adapter && !lease) {
    try {
      lease = lora_cache_->acquire(sequence.adapter);
    } catch (const std::exception& error) {  // from a load made here
      plan.failed.push_back({&sequence, error.what()});
      return StartResult::kFailed;
    }
    if (lease) break;
    // Another thread has pinned an adapter in its place since it was ready.
    const AdapterReadiness readiness = ensure_adapter(sequence);
    if (readiness == AdapterReadiness::kReady) continue;
    skip(sequence, readiness, plan);
    return StartResult::kSkipped;
  }
  start(sequence, std::move(lease), plan);
  const std::int32_t most = std::min(tokens_left(plan), most_in_step(sequence));
  const std::int32_t count =
      without_cut(sequence, sequence.num_computed(), std::min(most, chunk_unit_), most);
  add_to_plan(sequence, count, true, plan);
  return StartResult::kStarted;
}

void Scheduler::start(Sequence& sequence, std::optional<DeviceLease> lease, StepPlan& plan) {
  waiting_.start(sequence);
  if (waiting_.is_fair() && !sequence.preempted) sequence.place = next_place_++;
  if (sequence.preempted) --num_preempted_;
  sequence.preempted = false;
  sequence.times_skipped = 0;
  if (lease) sequence.lease = std::make_shared<const DeviceLease>(std::move(*lease));
  run(sequence);
  plan.started.push_back(&sequence);
  if (sequence.encoder_tokens) take_encoder_input(sequence, plan);
  if (starts_from_shared_memory(sequence)) reuse_prefix(sequence);
  if (may_preempt()) num_reserved_ += reserved_for(sequence);
  sequence.num_charged = std::max(sequence.num_charged, sequence.num_computed());
  charge(sequence, sequence.num_tokens());
}

bool Scheduler::may_reuse_encoder_input(const Sequence& sequence) {
  // After its first run, the output has been returned.
  return !sequence.compute_encoder_input || sequence.times_preempted > 0;
}

void Scheduler::take_encoder_input(Sequence& sequence, StepPlan& plan) {
  const ReuseKey key = sequence.reuse_key();
  if (may_reuse_encoder_input(sequence) &&
      memory_.reuse_encoder_input(sequence.memory, key, sequence.encoder_tokens)) {
    return;
  }
  memory_.take_encoder_input(sequence.memory, key, sequence.encoder_tokens);
  plan.encoded.push_back(&sequence);
  plan.num_encoder_tokens += sequence.encoder_length();
}

void Scheduler::reuse_prefix(Sequence& sequence) {
  const auto is_copied_later = [this](BlockId block) {
    return std::ranges::any_of(copies_,
                               [&](const PlannedCopy& planned) { return planned.blocks.from == block; });
  };
  add_copy(sequence, memory_.reuse_prefix(sequence.memory, sequence.content(), is_copied_later));
}

}  // namespace adaptrt
