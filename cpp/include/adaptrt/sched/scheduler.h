#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/kv/sequence_memory.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler_config.h"
#include "adaptrt/sched/sequence.h"
#include "adaptrt/sched/waiting_queue.h"

namespace adaptrt {

struct SchedulerLimits {
  /// Maximum number of sequences that run at the same time.
  std::int32_t max_batch_size = 0;
  /// Maximum number of tokens in one step.
  std::int32_t max_num_tokens = 0;
  /// True if a prompt may be computed over several steps. If false, a prompt waits until a step has room for
  /// all of it. Exception: a preempted sequence with more than max_num_tokens tokens is computed in chunks
  /// anyway.
  bool enable_chunked_context = false;
  /// EngineInfo::max_reusable_prompt_len.
  std::int32_t max_reusable_prompt_len = 0;
  /// Number of requests with adapters that may start ahead of a request whose adapter gets no pages. After
  /// that no other such request starts, and no adapter is loaded for one, until it has started.
  std::int32_t max_times_skipped = 16;
  /// Maximum number of logit rows in a step with drafts. Up to this number reading the weights limits a step,
  /// and one more row costs little. Beyond it a wrong draft takes time from other sequences.
  std::int32_t max_rows_with_drafts = 32;
};

/// The tokens of one sequence that a step computes.
struct PlannedSequence {
  Sequence* sequence = nullptr;
  /// The step computes sequence->tokens[first_token, first_token + count); first_token is also the first
  /// position.
  std::int32_t first_token = 0;
  std::int32_t count = 0;
  /// False for a decode, which computes only the newest generated token. A sequence that starts or resumes is
  /// a prefill, even if it has only one token left to compute.
  bool is_prefill = false;
  /// True if the step computes all remaining tokens: the next token is sampled from the logits of the last
  /// one.
  bool wants_logits = false;
  /// The first num_drafts of sequence->drafts are computed after these tokens. Their logits give further
  /// tokens, as long as every earlier draft equals the sampled token.
  std::int32_t num_drafts = 0;

  /// Position after the tokens; also the position of the first draft.
  [[nodiscard]] std::int32_t end() const { return first_token + count; }
  /// Number of accepted drafts: `sequence` has since got these tokens and one more after each. Their KV is
  /// the KV of its tokens. A draft whose logits could not be used is computed again.
  [[nodiscard]] std::int32_t num_right_drafts() const;
};

/// The copy with which a sequence begins a block of its own.
struct PlannedCopy {
  Sequence* sequence = nullptr;
  BlockCopy blocks;

  bool operator==(const PlannedCopy&) const = default;
};

/// The copy of states with which a sequence begins, or that keeps a snapshot of them.
struct PlannedStateCopy {
  Sequence* sequence = nullptr;  ///< nullptr: the copy is a snapshot
  StateSlot from = kNoStateSlot;
  StateSlot to = kNoStateSlot;

  bool operator==(const PlannedStateCopy&) const = default;
};

/// A move of one beam to another: `to` gives up its beam and continues from `from`, a beam of the same
/// request.
struct BeamMove {
  const Sequence* from = nullptr;
  Sequence* to = nullptr;
};

/// A request whose adapter failed to load.
struct FailedStart {
  Sequence* sequence = nullptr;
  std::string reason;
};

/// The plan of one step. Each step reuses the object, so that planning does not allocate.
struct StepPlan {
  std::vector<PlannedSequence> entries;  ///< decodes first
  /// Copies to make, in this order, before the step writes anything. They are for running sequences, planned
  /// or not.
  std::vector<PlannedCopy> copies;
  /// The same for states.
  std::vector<PlannedStateCopy> state_copies;
  std::vector<Sequence*> started;  ///< started or resumed by this plan
  std::vector<Sequence*> encoded;  ///< the sequences in `started` whose encoder inputs the step computes
  /// Sequences that lost their memory and lease, and wait again. A plan that preempts a sequence starts none.
  std::vector<Sequence*> preempted;
  /// Waiting sequences whose adapter can never get pages: it gets none although no running request holds any
  /// (others are pinned). The executor removes them with an error.
  std::vector<Sequence*> unservable;
  /// Waiting sequences whose adapter failed to load. The executor removes them with an error.
  std::vector<FailedStart> failed;
  /// True if requests wait for adapter loads; LoraCacheOptions::on_load_end tells when to plan again.
  bool awaits_loads = false;
  /// True if the batch has room for requests whose adapters get no room on the device level.
  bool awaits_adapter_room = false;
  std::int32_t num_tokens = 0;          ///< includes drafts
  std::int32_t num_encoder_tokens = 0;  ///< in the inputs of `encoded`
  std::int32_t num_draft_tokens = 0;
  std::int32_t num_context_tokens = 0;
  std::int32_t num_context_sequences = 0;
  std::int32_t num_generation_sequences = 0;

  [[nodiscard]] bool empty() const { return entries.empty(); }
  void clear();
};

/// Schedules in-flight batches: decides before each step which sequences compute which tokens. Not
/// thread-safe.
///
/// Memory: what a sequence keeps between steps is in SequenceMemory. The scheduler decides when a sequence
/// gets some, grows, is forked or loses it; SequenceMemoryPool knows what it consists of.
///
/// Order: decodes come first, then running prompts, then waiting sequences in WaitingQueue's order. A request
/// that gets no KV blocks, or no tokens in the step, blocks the requests after it. A request whose adapter is
/// still loading blocks none; it starts with the first plan after the load. A request whose adapter gets no
/// pages blocks none either, up to SchedulerLimits::max_times_skipped.
///
/// Prefetch: if the LoRA cache has load workers, each plan asks for the adapters of the next requests in
/// order, as many as could run at the same time. No adapter is evicted for a later request than its own. A
/// static batch begins when all adapters that are loading for it are ready.
///
/// Forks: the sequences of a request begin as one. When its prompt is computed, the others are forked from it
/// and share its blocks and its lease. From then on each is preempted, resumed and removed
/// separately. The first sequence starts when the batch has room for all of them. If the policy never
/// preempts, there must also be KV blocks for all tokens that they may generate. Beams are such sequences
/// too; blocks are reserved for them under every policy.
///
/// Encoder: a sequence with an encoder input starts in a step that computes all of that input. This is not
/// needed if the keys and values from the encoder are cached, or if a sequence that starts in the same step
/// computes them. The sequence holds blocks for them, from a separate pool, until it is preempted or ends. A
/// step has room for max_num_tokens encoder tokens in addition to its other tokens.
///
/// No KV: if the pool has no blocks, the engine keeps no KV and sequences hold no blocks. A sequence then
/// starts in a step that has room for all of its tokens, even if chunked context is enabled.
///
/// States: a prefill's step ends where the memory wants a snapshot of the states, even if the step has room
/// for more of its tokens.
///
/// Drafts: the rest of a step's budget goes to drafts, one per sequence in turn. Drafts take no token and no
/// block from other work. They use the blocks that are promised to their sequence. With kMaxUtilization, they
/// use free blocks while no sequence waits and every running sequence could still get one more.
class Scheduler {
 public:
  /// `lora_cache` may be nullptr if no sequence has an adapter. It and `memory` must outlive the scheduler
  /// and its sequences. Throws ConfigError if a limit is not positive, and for the problems that
  /// config.validate() finds.
  Scheduler(const SchedulerConfig& config, const SchedulerLimits& limits, SequenceMemoryPool& memory,
            LoraCache* lora_cache);

  /// Returns why a request of this size and number of sequences (or beams) could not run even without other
  /// requests; nullopt if it could. LoraCache::admit() refuses adapters that never fit.
  [[nodiscard]] std::optional<std::string> check_capacity(std::int64_t prompt_length, std::int64_t max_tokens,
                                                          std::int32_t num_sequences = 1,
                                                          bool are_beams = false,
                                                          std::int64_t encoder_length = 0) const;

  /// Queues a sequence. Throws RequestError, and does not queue it, if check_capacity() gives a reason, if
  /// `tokens` is not the prompt, or if it has an adapter and there is no LoRA cache.
  void add(Sequence& sequence);

  /// Plans the next step. Sequences that start get their memory and lease here. An empty plan means that
  /// nothing can run now: the queue is empty, or its sequences are unservable, have failed, or wait for
  /// loads.
  void plan(StepPlan& plan);

  /// Plans the step after `plan`, which is not computed yet: each sequence of `plan` decodes the token that
  /// `plan` will give it, except sequences that then have max_tokens. Gives them their KV blocks, so cached
  /// blocks may be evicted one step earlier. Returns false, with an empty `ahead`, if another kind of step
  /// may follow: `plan` has other entries than decodes, or drafts, a running sequence is a beam or is not in
  /// `plan`, a waiting one may start, an adapter is awaited, or blocks would run out.
  ///
  /// `ahead` is the next plan: call end_ahead() instead of plan(). Until then remove() takes sequences out
  /// of it.
  [[nodiscard]] bool plan_ahead(const StepPlan& plan, StepPlan& ahead);
  /// The engine has computed everything that was planned before `ahead`. Releases kept_leases().
  void release_kept_leases() { kept_leases_.clear(); }
  /// remove() no longer changes the plan of plan_ahead().
  void end_ahead() { ahead_ = nullptr; }
  /// Leases of sequences that remove() took out of a plan of plan_ahead(): the step still reads their
  /// adapters.
  [[nodiscard]] std::span<const std::shared_ptr<const DeviceLease>> kept_leases() const {
    return kept_leases_;
  }

  /// Records that the step has run: its tokens and accepted drafts count as computed, and their full blocks
  /// can be reused. Call it before the sequences of the plan are removed. New tokens may be appended before
  /// or after, but before for sequences with planned drafts.
  void commit(const StepPlan& plan);

  /// Forks `child` from the running sequence `parent`, whose tokens so far were computed by the step that was
  /// just committed. `child` is in the state before add(). It has the parent's prompt, adapter and salt, and
  /// after the parent's computed tokens at least one token of its own. It runs from now on, or waits like a
  /// preempted sequence if no blocks are free.
  void fork(Sequence& parent, Sequence& child);
  /// Ends the forks of `parent`: the room reserved for them is released.
  static void end_forks(Sequence& parent) { parent.num_forks = 0; }

  /// Each `to` releases its memory and continues from the computed tokens of `from`; no sequence is in both
  /// roles. Call it after the commit of the step that computed the last of the request's beams. Their next
  /// tokens may be appended before or after.
  void move_beams(std::span<const BeamMove> moves);

  /// Handles a failed step: removes its sequences and those of its copies. Nothing that the step may have
  /// written is reused.
  void fail(const StepPlan& plan);

  /// Removes a sequence in any state (finished or cancelled) and releases its memory and lease. Its full
  /// blocks stay cached. Don't call it between plan() and commit() or fail().
  void remove(Sequence& sequence);

  /// Running sequences, sorted by priority, then by arrival (with adapter_fairness: by first start), then by
  /// index.
  [[nodiscard]] std::span<Sequence* const> running() const { return running_; }
  struct Before {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };
  [[nodiscard]] const WaitingQueue& waiting() const { return waiting_; }
  [[nodiscard]] std::int32_t num_preempted() const { return num_preempted_; }
  /// Copies that no step has made yet.
  [[nodiscard]] std::span<const PlannedCopy> pending_copies() const { return copies_; }
  /// Number of sequences that will be forked from running ones.
  [[nodiscard]] std::int32_t num_promised_forks() const;
  [[nodiscard]] bool empty() const { return running_.empty() && waiting_.empty(); }
  [[nodiscard]] const SequenceMemoryPool& memory() const { return memory_; }
  [[nodiscard]] const SchedulerConfig& config() const { return config_; }
  [[nodiscard]] const SchedulerLimits& limits() const { return limits_; }
  /// Number of blocks that starting sequences must leave to the running ones, in addition to those that these
  /// have. It covers all tokens that they may generate. With kMaxUtilization it covers only their present
  /// tokens, except for beams.
  [[nodiscard]] std::int64_t num_promised_blocks() const;
  /// Number of blocks reserved for running beams, in addition to those that they have.
  [[nodiscard]] std::int64_t num_reserved_blocks() const;

 private:
  enum class StartResult : std::uint8_t { kStarted, kFailed, kSkipped, kNoRoom };

  /// True if the step after `plan` can only be one of decodes.
  [[nodiscard]] bool may_look_ahead(const StepPlan& plan) const;
  /// True if the sequence has max_tokens after its planned token.
  [[nodiscard]] static bool ends_after(const PlannedSequence& entry);
  /// Takes a sequence out of the plan of plan_ahead().
  void remove_from_ahead(const Sequence& sequence);
  void plan_entries(StepPlan& plan);
  void plan_decodes(StepPlan& plan);
  /// Returns false if a prefill has joint tokens for which too few tokens of the step are left. No sequence
  /// may start then, so that later steps have fewer decodes.
  bool plan_running_prefills(StepPlan& plan);
  void collect_failed_loads(StepPlan& plan) const;
  /// True if the plan has no room for another sequence.
  [[nodiscard]] bool is_full(const StepPlan& plan) const;
  void start_waiting(StepPlan& plan, bool may_start);
  /// True if an adapter of a request that may run next is being loaded.
  [[nodiscard]] bool next_are_loading(const StepPlan& plan);
  [[nodiscard]] AdapterReadiness ensure_adapter(const Sequence& sequence);
  StartResult try_start(Sequence& sequence, StepPlan& plan);
  /// True if the step has room for the sequence's encoder input and there is memory for its keys and values,
  /// or if neither is needed.
  [[nodiscard]] bool has_encoder_room(const Sequence& sequence, const StepPlan& plan) const;
  /// True if the sequence may reuse keys and values instead of computing its encoder input.
  [[nodiscard]] static bool may_reuse_encoder_input(const Sequence& sequence);
  /// Gives a starting sequence the memory of its encoder input.
  void take_encoder_input(Sequence& sequence, StepPlan& plan);
  void skip(Sequence& sequence, AdapterReadiness readiness, StepPlan& plan);
  void start(Sequence& sequence, std::optional<DeviceLease> lease, StepPlan& plan);
  void run(Sequence& sequence);
  void preempt(Sequence& sequence);
  /// Gives a starting sequence the memory of others that matches its tokens.
  void reuse_prefix(Sequence& sequence);
  /// Plans a copy unless none is needed.
  void add_copy(Sequence& sequence, const BlockCopy& copy);
  void add_to_plan(Sequence& sequence, std::int32_t count, bool is_prefill, StepPlan& plan);
  void grow_entry(PlannedSequence& entry, std::int32_t count, StepPlan& plan);
  /// Shares the remaining tokens of the step equally among its prefills.
  void distribute_tokens(StepPlan& plan);
  void plan_drafts(StepPlan& plan);
  /// Returns the number of blocks that drafts may take.
  [[nodiscard]] std::int64_t num_spare_blocks() const;
  /// Returns false if there is no room for the draft.
  bool add_draft(PlannedSequence& entry, std::int64_t& num_spare_blocks);
  void charge(Sequence& sequence, std::int32_t num_tokens);
  void preempt(Sequence& sequence, StepPlan& plan);
  void stop_running(Sequence& sequence);
  bool preempt_prefill_after(std::size_t index, StepPlan& plan);
  /// Returns the last running sequence that is not a beam; one must exist.
  [[nodiscard]] Sequence& next_to_preempt() const;
  [[nodiscard]] std::int32_t room_for(const Sequence& sequence) const;
  [[nodiscard]] std::int64_t blocks_wanted(const Sequence& sequence) const;
  /// Returns the sequence's part of num_reserved_blocks().
  [[nodiscard]] std::int64_t reserved_for(const Sequence& sequence) const;
  /// True if a fork of `parent` takes no block that is reserved for beams.
  [[nodiscard]] bool leaves_reserved_blocks(const Sequence& parent) const;
  /// Returns the number of blocks that a sequence of this size and its forks can need.
  [[nodiscard]] std::int64_t blocks_with_forks(std::int64_t prompt_length, std::int64_t max_tokens,
                                               std::int32_t num_forks) const;
  [[nodiscard]] bool may_preempt() const {
    return config_.capacity_scheduler_policy == CapacitySchedulerPolicy::kMaxUtilization;
  }
  /// True if the pool has no blocks: each sequence is computed whole, in one step.
  [[nodiscard]] bool computes_sequences_whole() const { return memory_.num_blocks() == 0; }
  [[nodiscard]] bool looks_ahead() const { return lora_cache_ != nullptr && lora_cache_->has_load_workers(); }
  [[nodiscard]] bool any_lease() const;
  [[nodiscard]] bool shares_memory(const Sequence& sequence) const;
  [[nodiscard]] bool starts_from_shared_memory(const Sequence& sequence) const;
  [[nodiscard]] std::int32_t tokens_left(const StepPlan& plan) const;
  /// Returns how many tokens of a prefill a step may compute: all that are left, or fewer if a snapshot of
  /// its states is wanted before their end.
  [[nodiscard]] std::int32_t most_in_step(const Sequence& sequence) const;
  /// Returns a number of tokens from position `first` on that cuts no joint tokens: up to their end, which
  /// may be more than `count` but not more than `most`, or else up to their beginning, which may be 0.
  [[nodiscard]] static std::int32_t without_cut(const Sequence& sequence, std::int32_t first,
                                                std::int32_t count, std::int32_t most);
  /// Returns the least number of tokens from position `first` on that a step can compute.
  [[nodiscard]] static std::int32_t least_from(const Sequence& sequence, std::int32_t first);
  void plan_state_copies(StepPlan& plan) const;

  SchedulerConfig config_;
  SchedulerLimits limits_;
  SequenceMemoryPool& memory_;
  LoraCache* lora_cache_;
  std::vector<Sequence*> running_;
  std::vector<PlannedCopy> copies_;
  WaitingQueue waiting_;
  std::uint64_t next_arrival_ = 0;
  std::uint64_t next_place_ = 0;
  /// Number of tokens that one prefill takes before the others get theirs.
  std::int32_t chunk_unit_;
  std::int32_t num_preempted_ = 0;
  std::uint64_t turn_ = 0;  // number of the plan that is being made
  /// True if sequences came, left or were preempted since the newest plan() began.
  bool has_changed_ = false;
  StepPlan* ahead_ = nullptr;  // nullptr if plan() comes next
  std::vector<std::shared_ptr<const DeviceLease>> kept_leases_;
  // State of the plan that is being made:
  std::vector<Sequence*> skipped_;  // sequences whose adapters get no pages
  bool may_lease_ = true;           // false once a request ahead was passed over too often
  std::int32_t num_loading_ = 0;    // requests that wait for adapter loads
  std::int64_t num_reserved_ = 0;   // num_reserved_blocks(), if the policy may preempt sequences
};

}  // namespace adaptrt
