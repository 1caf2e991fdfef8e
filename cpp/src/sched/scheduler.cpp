#include "adaptrt/sched/scheduler.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

namespace {

void check_limits(const SchedulerLimits& limits) {
  Problems problems;
  const auto require_positive = [&](const char* name, std::int32_t value) {
    if (value < 1) problems.add(std::string(name) + " is " + std::to_string(value) + "; it must be positive");
  };
  require_positive("max_batch_size", limits.max_batch_size);
  require_positive("max_num_tokens", limits.max_num_tokens);
  if (limits.max_reusable_prompt_len < 0) problems.add("max_reusable_prompt_len is negative");
  if (limits.max_times_skipped < 0) problems.add("max_times_skipped is negative");
  if (limits.max_rows_with_drafts < 0) problems.add("max_rows_with_drafts is negative");
  problems.throw_if_any<ConfigError>("Scheduler");
}

/// Every running sequence has tokens to compute (except a beam that waits for others) and tokens to generate;
/// otherwise the executor has removed it.
void require_unfinished(const Sequence& sequence) {
  if ((sequence.num_to_compute() < 1 && !sequence.is_beam) ||
      sequence.num_generated() >= sequence.max_tokens) {
    throw std::logic_error("sequence " + std::to_string(sequence.id) +
                           " was not removed when it had finished");
  }
}

}  // namespace

void StepPlan::clear() {
  entries.clear();
  copies.clear();
  state_copies.clear();
  started.clear();
  encoded.clear();
  preempted.clear();
  unservable.clear();
  failed.clear();
  awaits_loads = false;
  awaits_adapter_room = false;
  num_tokens = 0;
  num_encoder_tokens = 0;
  num_draft_tokens = 0;
  num_context_tokens = 0;
  num_context_sequences = 0;
  num_generation_sequences = 0;
}

bool Scheduler::Before::operator()(const Sequence* a, const Sequence* b) const {
  if (a->priority != b->priority) return a->priority > b->priority;
  if (a->place != b->place) return a->place < b->place;
  return a->index < b->index;
}

Scheduler::Scheduler(const SchedulerConfig& config, const SchedulerLimits& limits, SequenceMemoryPool& memory,
                     LoraCache* lora_cache)
    : config_(config),
      limits_(limits),
      memory_(memory),
      lora_cache_(lora_cache),
      waiting_(config.adapter_fairness),
      chunk_unit_(config.context_chunking_policy == ContextChunkingPolicy::kEqualProgress &&
                          !computes_sequences_whole()
                      ? memory.tokens_per_block()
                      : limits.max_num_tokens) {
  config.validate(limits.enable_chunked_context).throw_if_any<ConfigError>("SchedulerConfig");
  check_limits(limits);
}

void Scheduler::add(Sequence& sequence) {
  Problems problems;
  if (auto reason = check_capacity(sequence.prompt_length, sequence.max_tokens, 1 + sequence.num_forks,
                                   sequence.is_beam, sequence.encoder_length())) {
    problems.add(std::move(*reason));
  }
  if (sequence.state != SequenceState::kNew) problems.add("it was queued before");
  if (sequence.num_tokens() != sequence.prompt_length) {
    problems.add("prompt_length is " + std::to_string(sequence.prompt_length) + ", but there are " +
                 std::to_string(sequence.num_tokens()) + " tokens");
  }
  // The condition is negated so that NaN is refused as well.
  if (!(sequence.priority >= 0.0F && sequence.priority <= 1.0F)) {
    problems.add("priority is " + std::to_string(sequence.priority) + "; it must lie between 0 and 1");
  }
  if ((sequence.encoder_length() > 0) != memory_.has_encoder()) {
    problems.add(memory_.has_encoder() ? "it has no encoder input"
                                       : "it has an encoder input, but there is no encoder");
  }
  if (sequence.adapter && lora_cache_ == nullptr)
    problems.add("it has an adapter, but there is no LoRA cache");
  problems.throw_if_any<RequestError>("request " + std::to_string(sequence.id));

  sequence.tokens.reserve(static_cast<std::size_t>(sequence.prompt_length) + sequence.max_tokens);
  memory_.reserve(sequence.memory, sequence.max_computed_tokens());
  sequence.arrival = sequence.place = next_arrival_++;
  waiting_.push(sequence);
  sequence.state = SequenceState::kWaiting;
  has_changed_ = true;
}

void Scheduler::plan(StepPlan& plan) {
  plan.clear();
  ++turn_;
  has_changed_ = false;
  num_reserved_ = may_preempt() ? num_reserved_blocks() : 0;
  plan_entries(plan);
  plan_drafts(plan);
  if (!plan.empty()) plan.copies.assign(copies_.begin(), copies_.end());
  if (!plan.empty()) plan_state_copies(plan);
  if (!plan.empty() && plan.awaits_adapter_room) lora_cache_->count_waiting_step();
}

void Scheduler::plan_entries(StepPlan& plan) {
  const bool is_static = config_.capacity_scheduler_policy == CapacitySchedulerPolicy::kStaticBatch;
  // A new batch waits for the last sequence of the old one, even if this plan preempts it.
  bool may_start = !is_static || running_.empty();
  plan_decodes(plan);
  if (!plan_running_prefills(plan)) may_start = false;
  if (lora_cache_ != nullptr) collect_failed_loads(plan);
  if (plan.preempted.empty()) {
    plan.awaits_loads = is_static && may_start && looks_ahead() && next_are_loading(plan);
    if (!plan.awaits_loads) start_waiting(plan, may_start);
    // Requests after those without room may have filled the batch.
    if (is_full(plan)) plan.awaits_adapter_room = false;
  }
  distribute_tokens(plan);
}

void Scheduler::plan_decodes(StepPlan& plan) {
  // Preemption removes sequences from the end, so those before `i` stay, planned or not.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    require_unfinished(sequence);
    if (!sequence.is_decoding()) continue;
    if (tokens_left(plan) == 0) break;
    while (sequence.state == SequenceState::kRunning && room_for(sequence) < 1)
      preempt(next_to_preempt(), plan);
    if (sequence.state == SequenceState::kRunning) add_to_plan(sequence, 1, false, plan);
  }
}

bool Scheduler::plan_running_prefills(StepPlan& plan) {
  bool have_room = true;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.is_decoding() || sequence.num_to_compute() == 0) continue;
    const std::int32_t left = tokens_left(plan);
    if (left == 0) break;
    const std::int32_t first = sequence.num_computed();
    while (room_for(sequence) < least_from(sequence, first) && preempt_prefill_after(i, plan)) {
    }
    // Without room, the prefill waits for the decodes of this step to end. They started later but are already
    // planned.
    const std::int32_t most = std::min({left, most_in_step(sequence), room_for(sequence)});
    const std::int32_t count = without_cut(sequence, first, std::min(most, chunk_unit_), most);
    if (count > 0) add_to_plan(sequence, count, true, plan);
    have_room = have_room && least_from(sequence, first) <= left;
  }
  return have_room;
}

void Scheduler::charge(Sequence& sequence, std::int32_t num_tokens) {
  if (num_tokens <= sequence.num_charged) return;
  waiting_.charge(sequence, num_tokens - sequence.num_charged);
  sequence.num_charged = num_tokens;
}

void Scheduler::run(Sequence& sequence) {
  running_.insert(std::ranges::upper_bound(running_, &sequence, Before{}), &sequence);
  sequence.state = SequenceState::kRunning;
}

void Scheduler::add_to_plan(Sequence& sequence, std::int32_t count, bool is_prefill, StepPlan& plan) {
  plan.entries.push_back(
      {.sequence = &sequence, .first_token = sequence.num_computed(), .is_prefill = is_prefill});
  ++(is_prefill ? plan.num_context_sequences : plan.num_generation_sequences);
  grow_entry(plan.entries.back(), count, plan);
}

void Scheduler::grow_entry(PlannedSequence& entry, std::int32_t count, StepPlan& plan) {
  Sequence& sequence = *entry.sequence;
  const std::int64_t reserved = reserved_for(sequence);
  entry.count += count;
  entry.wants_logits = entry.count == sequence.num_to_compute();
  if (!memory_.try_grow(sequence.memory, sequence.num_computed() + entry.count)) {
    throw std::logic_error("sequence " + std::to_string(sequence.id) +
                           " does not get the KV blocks promised to it");
  }
  if (may_preempt()) num_reserved_ += reserved_for(sequence) - reserved;
  plan.num_tokens += count;
  if (entry.is_prefill) plan.num_context_tokens += count;
}

void Scheduler::preempt(Sequence& sequence, StepPlan& plan) {
  if (!may_preempt()) throw std::logic_error("KV blocks ran out although they were promised");
  stop_running(sequence);
  preempt(sequence);
  plan.preempted.push_back(&sequence);
}

void Scheduler::preempt(Sequence& sequence) {
  waiting_.push(sequence);
  has_changed_ = true;
  sequence.state = SequenceState::kWaiting;
  sequence.preempted = true;
  ++sequence.times_preempted;
  ++num_preempted_;
}

bool Scheduler::preempt_prefill_after(std::size_t index, StepPlan& plan) {
  for (std::size_t i = running_.size() - 1; i > index; --i) {
    if (running_[i]->is_decoding() || running_[i]->is_beam) continue;
    preempt(*running_[i], plan);
    return true;
  }
  return false;
}

void Scheduler::stop_running(Sequence& sequence) {
  running_.erase(std::ranges::find(running_, &sequence));
  std::erase_if(copies_, [&](const PlannedCopy& copy) { return copy.sequence == &sequence; });
  memory_.release(sequence.memory);
  sequence.lease.reset();
}

void Scheduler::commit(const StepPlan& plan) {
  copies_.clear();
  memory_.commit_state_copies();
  for (Sequence* sequence : plan.encoded) memory_.commit_encoder_input(sequence->memory);
  for (const PlannedSequence& entry : plan.entries) {
    Sequence& sequence = *entry.sequence;
    const std::int32_t num_right = entry.num_right_drafts();
    memory_.keep(sequence.memory, entry.end() + num_right, entry.num_drafts - num_right);
    if (waiting_.is_fair()) charge(sequence, sequence.num_computed());
    if (shares_memory(sequence)) memory_.share(sequence.memory, sequence.content());
  }
}

void Scheduler::fail(const StepPlan& plan) {
  for (const PlannedSequence& entry : plan.entries) remove(*entry.sequence);
  for (const PlannedCopy& copy : plan.copies) remove(*copy.sequence);
  for (const PlannedStateCopy& copy : plan.state_copies) {
    if (copy.sequence != nullptr) remove(*copy.sequence);
  }
  memory_.fail_state_copies();
}

void Scheduler::remove(Sequence& sequence) {
  has_changed_ = true;
  if (ahead_ != nullptr) remove_from_ahead(sequence);
  if (sequence.state == SequenceState::kRunning) {
    waiting_.erase(sequence);
    stop_running(sequence);
  } else if (sequence.state == SequenceState::kWaiting) {
    waiting_.erase(sequence);
    if (sequence.preempted) --num_preempted_;
  }
  sequence.state = SequenceState::kFinished;
}

bool Scheduler::any_lease() const {
  return std::ranges::any_of(running_, [](const Sequence* sequence) { return sequence->lease != nullptr; });
}

bool Scheduler::shares_memory(const Sequence& sequence) const {
  return !computes_sequences_whole() && sequence.prompt_length <= limits_.max_reusable_prompt_len;
}

bool Scheduler::starts_from_shared_memory(const Sequence& sequence) const {
  // After the first generated token, the logits of the whole prompt have been returned.
  return shares_memory(sequence) && !(sequence.compute_whole_prompt && sequence.num_generated() == 0);
}

std::int32_t Scheduler::tokens_left(const StepPlan& plan) const {
  return limits_.max_num_tokens - plan.num_tokens;
}

std::int32_t Scheduler::most_in_step(const Sequence& sequence) const {
  const std::int32_t left = sequence.num_to_compute();
  if (!memory_.has_states() || !shares_memory(sequence)) return left;
  return std::min(left, memory_.tokens_to_snapshot(sequence.memory, sequence.content()));
}

void Scheduler::plan_state_copies(StepPlan& plan) const {
  for (const StateCopy& copy : memory_.state_copies()) {
    Sequence* sequence = nullptr;
    if (copy.holder != nullptr) {
      sequence =
          *std::ranges::find(running_, copy.holder, [](const Sequence* running) { return &running->memory; });
    }
    plan.state_copies.push_back({.sequence = sequence, .from = copy.from, .to = copy.to});
  }
}

}  // namespace adaptrt
