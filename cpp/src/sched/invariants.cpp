#include "adaptrt/sched/invariants.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace adaptrt {

namespace {

class Report {
 public:
  // Texts are made only for violations: tests check every step, and would mostly make texts.
  void check(bool holds, const char* violation) {
    if (!holds) violations_.emplace_back(violation);
  }
  void check(bool holds, const Sequence& sequence, const char* violation) {
    if (holds) return;
    const std::string index = sequence.index == 0 ? "" : "." + std::to_string(sequence.index);
    violations_.push_back("sequence " + std::to_string(sequence.id) + index + " " + violation);
  }
  void append(const Sequence& sequence, const std::vector<std::string>& violations) {
    for (const std::string& violation : violations) check(false, sequence, violation.c_str());
  }
  void append(const std::vector<std::string>& violations) {
    violations_.insert(violations_.end(), violations.begin(), violations.end());
  }
  [[nodiscard]] std::vector<std::string> take() { return std::move(violations_); }

 private:
  std::vector<std::string> violations_;
};

void check_running(const Scheduler& scheduler, Report& report) {
  const auto running = scheduler.running();
  report.check(std::cmp_less_equal(running.size(), scheduler.limits().max_batch_size),
               "more sequences run than max_batch_size");
  report.check(
      std::cmp_less_equal(running.size(), scheduler.limits().max_batch_size - scheduler.num_promised_forks()),
      "more sequences are to be forked than there is room for in the batch");
  for (std::size_t i = 0; i + 1 < running.size(); ++i) {
    report.check(Scheduler::Before{}(running[i], running[i + 1]), *running[i], "runs out of order or twice");
  }
  for (Sequence* sequence : running) {
    report.check(sequence->state == SequenceState::kRunning, *sequence, "runs, but its state is another");
    report.check(!sequence->preempted, *sequence, "runs, but is marked as preempted");
    report.check(!scheduler.waiting().contains(*sequence), *sequence, "runs and waits");
    report.check((sequence->lease != nullptr) == (sequence->adapter != nullptr), *sequence,
                 "runs with an adapter and no lease, or the other way round");
    report.check(sequence->num_computed() <= sequence->num_tokens(), *sequence,
                 "has computed tokens that it lacks");
    report.check(sequence->num_computed() <= sequence->num_charged || !scheduler.waiting().is_fair(),
                 *sequence, "has computed tokens that its adapter is not charged for");
    const std::int32_t most_blocks = scheduler.memory().blocks_for(sequence->max_computed_tokens());
    report.check(sequence->memory.num_blocks() <= most_blocks, *sequence,
                 "has more blocks than it can ever need");
    report.check(sequence->num_generated() <= sequence->max_tokens, *sequence,
                 "has generated more than max_tokens");
    report.check(sequence->num_forks >= 0, *sequence, "has been forked more often than it may");
  }
}

void check_beams(const Scheduler& scheduler, Report& report) {
  for (const auto& sequences :
       {scheduler.waiting().list(), {scheduler.running().begin(), scheduler.running().end()}}) {
    for (const Sequence* sequence : sequences) {
      report.check(!sequence->is_beam || sequence->times_preempted == 0, *sequence,
                   "is a beam and was preempted");
    }
  }
  report.check(scheduler.num_reserved_blocks() <= scheduler.memory().num_available(),
               "more blocks are reserved for beams than available");
}

/// The beams of a request advance together, and at least one has a token to compute.
void check_beams_of_requests(const Scheduler& scheduler, Report& report) {
  std::map<std::uint64_t, std::vector<const Sequence*>> requests;
  for (const Sequence* sequence : scheduler.running()) {
    if (sequence->is_beam) requests[sequence->id].push_back(sequence);
  }
  for (const auto& [id, beams] : requests) {
    const std::int32_t num_tokens = beams.front()->num_tokens();
    bool any_to_compute = false;
    for (const Sequence* beam : beams) {
      report.check(beam->num_tokens() == num_tokens, *beam, "is a beam of another length than the others");
      report.check(beam->num_generated() == 0 || beam->num_to_compute() <= 1, *beam,
                   "is a beam that continues without its newest tokens");
      any_to_compute = any_to_compute || beam->num_to_compute() > 0;
    }
    report.check(any_to_compute, *beams.front(), "waits for beams that are all computed");
  }
}

/// Checks the copies that the next step makes.
void check_copies(const Scheduler& scheduler, Report& report) {
  std::set<BlockId> targets;
  for (const PlannedCopy& copy : scheduler.pending_copies()) {
    const Sequence& sequence = *copy.sequence;
    report.check(sequence.state == SequenceState::kRunning, sequence, "awaits a copy and does not run");
    report.append(sequence, scheduler.memory().check_invariants(sequence.memory, copy.blocks));
    report.check(targets.insert(copy.blocks.to).second, sequence, "awaits two copies to one block");
  }
}

/// A sequence that starts within a block must have the block's earlier tokens in it.
void check_beginnings(const StepPlan& plan, const SequenceMemoryPool& memory, Report& report) {
  const PartialReuse partial_reuse = memory.block_pool().partial_reuse();
  for (const PlannedSequence& entry : plan.entries) {
    const Sequence& sequence = *entry.sequence;
    if (entry.first_token % memory.tokens_per_block() == 0 ||
        std::ranges::find(plan.started, &sequence) == plan.started.end()) {
      continue;
    }
    const bool has_copy =
        std::ranges::find(plan.copies, &sequence, &PlannedCopy::sequence) != plan.copies.end();
    report.check(partial_reuse != PartialReuse::kNone, sequence, "starts within a block");
    report.check(has_copy == (partial_reuse == PartialReuse::kCopy), sequence,
                 "starts within a block that is not the copy of another, or is taken over and copied");
  }
}

void check_waiting(const Scheduler& scheduler, Report& report) {
  report.append(scheduler.waiting().check_invariants(scheduler.running()));
  std::int32_t num_preempted = 0;
  for (const Sequence* sequence : scheduler.waiting().list()) {
    report.check(sequence->state == SequenceState::kWaiting, *sequence, "waits, but its state is another");
    report.check(sequence->memory.blocks().empty(), *sequence, "waits and holds blocks");
    report.check(sequence->memory.states.slot == kNoStateSlot, *sequence, "waits and holds states");
    report.check(!sequence->memory.cross, *sequence, "waits and holds blocks for its encoder input");
    report.check(!sequence->lease, *sequence, "waits and holds a lease");
    report.check(sequence->num_computed() == 0, *sequence, "waits and has computed tokens");
    if (sequence->preempted) ++num_preempted;
  }
  report.check(num_preempted == scheduler.num_preempted(),
               "num_preempted() does not count the preempted sequences");
}

void check_memory(const Scheduler& scheduler, Report& report) {
  const SequenceMemoryPool& memory = scheduler.memory();
  std::vector<const SequenceMemory*> held;
  for (const Sequence* sequence : scheduler.running()) {
    held.push_back(&sequence->memory);
    report.append(*sequence, memory.check_invariants(sequence->memory));
  }
  report.append(memory.check_invariants(held));
  if (scheduler.config().capacity_scheduler_policy != CapacitySchedulerPolicy::kMaxUtilization) {
    report.check(scheduler.num_promised_blocks() <= memory.num_available(),
                 "more blocks are promised than available");
  }
}

/// Each running sequence has the blocks of its own encoder input.
void check_encoder_inputs(const Scheduler& scheduler, Report& report) {
  for (const Sequence* sequence : scheduler.running()) {
    const CrossBlocks* const cross = sequence->memory.cross.get();
    report.check((cross != nullptr) == (sequence->encoder_length() > 0), *sequence,
                 "runs with an encoder input and no blocks for it, or the other way round");
    if (cross == nullptr) continue;
    const CrossContent& content = cross->content();
    report.check(*content.tokens == *sequence->encoder_tokens && content.key == sequence->reuse_key(),
                 *sequence, "has blocks for another encoder input, or of another adapter");
    report.check(content.is_written || sequence->num_computed() == 0, *sequence,
                 "continues with an encoder input that was not computed");
  }
}

/// Each encoder input is computed once, before anything reads its result.
void check_encoded(const StepPlan& plan, const Scheduler& scheduler, Report& report) {
  std::set<const CrossBlocks*> encoded;
  std::int32_t num_tokens = 0;
  for (const Sequence* sequence : plan.encoded) {
    num_tokens += sequence->encoder_length();
    report.check(std::ranges::find(plan.started, sequence) != plan.started.end(), *sequence,
                 "does not start, but its encoder input is computed");
    const CrossBlocks* const cross = sequence->memory.cross.get();
    report.check(cross != nullptr && !cross->content().is_written, *sequence,
                 "has an encoder input that is computed again");
    report.check(encoded.insert(cross).second, *sequence,
                 "has an encoder input that is computed twice, to the same blocks");
  }
  report.check(plan.num_encoder_tokens == num_tokens,
               "num_encoder_tokens does not count the encoder inputs that are computed");
  report.check(num_tokens <= scheduler.limits().max_num_tokens,
               "more tokens of encoder inputs are planned than max_num_tokens");
  for (const PlannedSequence& entry : plan.entries) {
    const CrossBlocks* const cross = entry.sequence->memory.cross.get();
    report.check(cross == nullptr || cross->content().is_written || encoded.contains(cross), *entry.sequence,
                 "reads an encoder input that no sequence computes");
  }
}

void check_leases(const Scheduler& scheduler, const LoraCache& cache, Report& report) {
  report.append(cache.check_invariants());
  std::set<std::uint64_t> generations;
  for (const Sequence* sequence : scheduler.running()) {
    if (!sequence->adapter) continue;
    generations.insert(sequence->adapter->generation());
    report.check(cache.is_leased(*sequence->adapter), *sequence, "runs with an adapter that is not leased");
    if (!sequence->lease) continue;
    report.check(sequence->lease->adapter().task_id == sequence->adapter->task_id(), *sequence,
                 "leases an adapter that is not its own");
  }
  std::set<std::uint64_t> kept;
  for (const auto& lease : scheduler.kept_leases()) kept.insert(lease->adapter().task_id);
  std::set<std::uint64_t> pinned;
  for (const LoraCacheEntry& entry : cache.list()) {
    if (entry.pinned) pinned.insert(entry.task_id);
  }
  for (const Sequence* sequence : scheduler.waiting().list()) {
    const HostAdapter* adapter = sequence->adapter.get();
    if (adapter == nullptr || generations.contains(adapter->generation())) continue;
    report.check(!cache.is_leased(*adapter) || pinned.contains(adapter->task_id()) ||
                     kept.contains(adapter->task_id()),
                 *sequence, "waits for an adapter that is leased although nothing runs with it");
  }
}

/// Drafts come last: they take nothing from other work.
void check_drafts(const StepPlan& plan, const Scheduler& scheduler, Report& report) {
  std::int32_t num_drafts = 0;
  for (const PlannedSequence& entry : plan.entries) {
    const Sequence& sequence = *entry.sequence;
    num_drafts += entry.num_drafts;
    report.check(entry.num_drafts >= 0 && std::cmp_less_equal(entry.num_drafts, sequence.drafts.size()),
                 sequence, "is planned with drafts that it lacks");
    if (entry.num_drafts == 0) continue;
    report.check(entry.wants_logits, sequence, "is planned with drafts before its next token is due");
    report.check(entry.num_drafts < sequence.max_tokens - sequence.num_generated(), sequence,
                 "is planned with drafts beyond max_tokens");
    report.check(sequence.num_forks == 0, sequence, "is planned with drafts before it was forked");
  }
  report.check(plan.num_draft_tokens == num_drafts, "num_draft_tokens does not count the planned drafts");
  if (num_drafts == 0) return;
  report.check(plan.preempted.empty(), "drafts are planned although sequences had to be preempted");
  report.check(std::cmp_less_equal(plan.entries.size() + static_cast<std::size_t>(num_drafts),
                                   scheduler.limits().max_rows_with_drafts),
               "a step with drafts has more rows of logits than max_rows_with_drafts");
  for (const Sequence* sequence : scheduler.running()) {
    const bool is_planned =
        std::ranges::find(plan.entries, sequence, &PlannedSequence::sequence) != plan.entries.end();
    // Beams keep blocks from others.
    const std::int64_t num_kept = sequence->is_beam ? 0 : scheduler.num_reserved_blocks();
    // A beam whose tokens are computed waits for the other beams.
    report.check(
        is_planned || sequence->num_to_compute() == 0 || scheduler.memory().num_available() <= num_kept,
        *sequence, "is not planned although there are drafts");
  }
}

/// No step ends between tokens that attend to each other.
void check_joint_tokens(const StepPlan& plan, Report& report) {
  for (const PlannedSequence& entry : plan.entries) {
    if (!entry.is_prefill || !entry.sequence->joint) continue;
    const auto is_cut = [&](const JointTokens& tokens) {
      return tokens.begin < entry.end() && entry.end() < tokens.end;
    };
    report.check(std::ranges::none_of(*entry.sequence->joint, is_cut), *entry.sequence,
                 "is planned up to the middle of tokens that attend to each other");
  }
}

bool ends_at_snapshot(const PlannedSequence& entry, const Scheduler& scheduler) {
  const Sequence& sequence = *entry.sequence;
  return sequence.prompt_length <= scheduler.limits().max_reusable_prompt_len &&
         entry.count == scheduler.memory().tokens_to_snapshot(sequence.memory, sequence.content());
}

/// Each planned sequence has states of its own, and reads no copy that is made later.
void check_states(const StepPlan& plan, const Scheduler& scheduler, Report& report) {
  const SequenceMemoryPool& memory = scheduler.memory();
  if (!memory.has_states()) return;
  std::vector<PlannedStateCopy> pending;
  for (const StateCopy& copy : memory.state_copies()) {
    Sequence* holder = nullptr;
    for (Sequence* sequence : scheduler.running()) {
      if (&sequence->memory == copy.holder) holder = sequence;
    }
    pending.push_back({.sequence = holder, .from = copy.from, .to = copy.to});
  }
  report.check(plan.empty() ? plan.state_copies.empty() : plan.state_copies == pending,
               "the plan's copies of states are not those that sequences and snapshots await");
  for (const PlannedSequence& entry : plan.entries) {
    const Sequence& sequence = *entry.sequence;
    report.check(sequence.memory.states.slot != kNoStateSlot, sequence, "is planned without states");
    report.check((entry.num_drafts > 0) == (sequence.memory.states.saved != kNoStateSlot), sequence,
                 "has drafts and no saved states, or the other way round");
    report.check(entry.num_drafts == 0 || !entry.is_prefill, sequence,
                 "has drafts after several tokens, which its states would lose too");
    const bool starts = std::ranges::find(plan.started, &sequence) != plan.started.end();
    const bool awaits = std::ranges::any_of(
        plan.state_copies, [&](const PlannedStateCopy& copy) { return copy.sequence == &sequence; });
    report.check(!starts || awaits == (entry.first_token > 0), sequence,
                 "starts after reused tokens without their states, or the other way round");
    if (!entry.is_prefill || sequence.prompt_length > scheduler.limits().max_reusable_prompt_len) continue;
    report.check(entry.count <= memory.tokens_to_snapshot(sequence.memory, sequence.content()), sequence,
                 "is planned beyond a wanted snapshot of its states");
  }
}

/// With equal progress, and if blocks cannot run out, prompts that do not end in this step get the same
/// number of tokens, except for the last chunk and for chunks that grow so as not to cut joint tokens.
void check_shares(const StepPlan& plan, const Scheduler& scheduler, Report& report) {
  const SchedulerConfig& config = scheduler.config();
  if (config.context_chunking_policy != ContextChunkingPolicy::kEqualProgress ||
      config.capacity_scheduler_policy == CapacitySchedulerPolicy::kMaxUtilization) {
    return;
  }
  std::int32_t least = scheduler.limits().max_num_tokens;
  std::int32_t most = 0;
  for (const PlannedSequence& entry : plan.entries) {
    if (!entry.is_prefill || entry.sequence->joint) continue;
    most = std::max(most, entry.count);
    if (!entry.wants_logits && !ends_at_snapshot(entry, scheduler)) least = std::min(least, entry.count);
  }
  report.check(most <= least + scheduler.memory().tokens_per_block(),
               "prompts do not get equal shares of the step");
}

}  // namespace

std::vector<std::string> check_invariants(const Scheduler& scheduler, const LoraCache* lora_cache) {
  Report report;
  check_encoder_inputs(scheduler, report);
  check_running(scheduler, report);
  check_waiting(scheduler, report);
  check_memory(scheduler, report);
  check_copies(scheduler, report);
  check_beams(scheduler, report);
  if (lora_cache != nullptr) check_leases(scheduler, *lora_cache, report);
  return report.take();
}

std::vector<std::string> check_invariants(const StepPlan& plan, const Scheduler& scheduler) {
  const SequenceMemoryPool& memory = scheduler.memory();
  Report report;
  check_shares(plan, scheduler, report);
  check_joint_tokens(plan, report);
  check_states(plan, scheduler, report);
  check_beginnings(plan, memory, report);
  check_drafts(plan, scheduler, report);
  check_beams_of_requests(scheduler, report);
  check_encoded(plan, scheduler, report);
  std::set<const Sequence*> planned;
  std::int32_t num_context_tokens = 0;
  std::int32_t num_context_sequences = 0;
  bool prefills_began = false;
  for (const PlannedSequence& entry : plan.entries) {
    const Sequence& sequence = *entry.sequence;
    const std::int32_t end = entry.end();
    report.check(planned.insert(&sequence).second, sequence, "is planned twice");
    report.check(sequence.state == SequenceState::kRunning, sequence, "is planned, but does not run");
    report.check(entry.count >= 1, sequence, "is planned without tokens");
    report.check(entry.first_token == sequence.num_computed(), sequence,
                 "does not continue after its computed tokens");
    report.check(end <= sequence.num_tokens(), sequence, "is planned beyond its tokens");
    report.check(entry.wants_logits == (end == sequence.num_tokens()), sequence,
                 "wants logits at the wrong time");
    report.check(entry.is_prefill || sequence.is_decoding(), sequence,
                 "is planned as a decode, but is a prefill");
    report.check(entry.is_prefill || !prefills_began, sequence, "is a decode after a prefill");
    prefills_began = prefills_began || entry.is_prefill;
    if (entry.is_prefill) {
      num_context_tokens += entry.count;
      ++num_context_sequences;
    }
    report.check(memory.blocks_to_grow(sequence.memory, end + entry.num_drafts) == 0, sequence,
                 "lacks blocks for its planned tokens");
    report.check(memory.may_write(sequence.memory, entry.first_token, end + entry.num_drafts), sequence,
                 "would write to a shared block");
    report.check((sequence.device_adapter() != nullptr) == (sequence.adapter != nullptr), sequence,
                 "is planned without its adapter");
  }
  report.check(
      plan.empty() ? plan.copies.empty() : std::ranges::equal(plan.copies, scheduler.pending_copies()),
      "the plan's copies are not those that sequences await");
  report.check(plan.preempted.empty() || plan.started.empty(),
               "sequences start although others had to be preempted");
  for (const Sequence* sequence : plan.unservable) {
    report.check(sequence->state == SequenceState::kWaiting, *sequence, "is unservable and does not wait");
  }
  for (const FailedStart& failed : plan.failed) {
    report.check(failed.sequence->state == SequenceState::kWaiting, *failed.sequence,
                 "has failed to start and does not wait");
    report.check(failed.sequence->adapter != nullptr, *failed.sequence,
                 "has failed to load an adapter and has none");
  }
  if (plan.empty() && !scheduler.waiting().empty()) {
    report.check(
        plan.awaits_loads || !plan.preempted.empty() || !plan.unservable.empty() || !plan.failed.empty(),
        "nothing runs, sequences wait, and the plan gives no reason");
  }
  std::int32_t num_tokens = 0;
  for (const PlannedSequence& entry : plan.entries) num_tokens += entry.count + entry.num_drafts;
  report.check(plan.num_tokens == num_tokens, "num_tokens does not count the planned tokens");
  report.check(num_tokens <= scheduler.limits().max_num_tokens,
               "more tokens are planned than max_num_tokens");
  report.check(plan.num_context_tokens == num_context_tokens,
               "num_context_tokens does not count the prefills' tokens");
  report.check(plan.num_context_sequences == num_context_sequences,
               "num_context_sequences does not count the prefills");
  report.check(std::cmp_equal(plan.num_generation_sequences + num_context_sequences, plan.entries.size()),
               "num_generation_sequences does not count the decodes");
  return report.take();
}

}  // namespace adaptrt
