#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/kv/block_pool.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler_config.h"
#include "adaptrt/sched/sequence.h"
#include "adaptrt/sched/waiting_queue.h"

namespace adaptrt {

struct SchedulerLimits {
  /// Sequences that run at once.
  std::int32_t max_batch_size = 0;
  /// Tokens of one step.
  std::int32_t max_num_tokens = 0;
  /// Prompts may be computed over several steps. If not, a prompt waits until a step has room for all of it;
  /// only a paused request whose tokens have become more than max_num_tokens is computed in pieces all the
  /// same.
  bool enable_chunked_context = false;
  /// EngineInfo::max_reusable_prompt_len.
  std::int32_t max_reusable_prompt_len = 0;
  /// So often may requests with adapters start ahead of one whose adapter gets no pages; then they are held
  /// back, their loads included, until it has started.
  std::int32_t max_times_passed_over = 16;
  /// Steps with drafts have at most so many rows of logits. Up to there a step is bound by reading the
  /// weights, and a row more costs little; beyond, a wrong draft costs others what it costs itself.
  std::int32_t max_rows_with_drafts = 32;
};

/// What one sequence computes in a step.
struct PlannedSequence {
  Sequence* sequence = nullptr;
  /// sequence->tokens[first_token, first_token + count); first_token is also the first position.
  std::int32_t first_token = 0;
  std::int32_t count = 0;
  /// False: a decode, whose one token is the newest generated. What starts or resumes is a prefill, however
  /// little of it is left to compute.
  bool is_prefill = false;
  /// These are all that was left to compute: the next token is sampled from the logits of the last one.
  bool wants_logits = false;
  /// So many of sequence->drafts are computed behind these tokens, and the next tokens are sampled from their
  /// logits as well, as long as the drafts before are what was sampled.
  std::int32_t num_drafts = 0;

  /// The position behind the tokens; that of the first draft.
  [[nodiscard]] std::int32_t end() const { return first_token + count; }
  /// Drafts that `sequence` has got as tokens since, and another token behind each: their KV is that of its
  /// tokens. One whose logits could not be used is computed again.
  [[nodiscard]] std::int32_t num_right_drafts() const;
};

/// What a sequence begins its own block with.
struct PlannedCopy {
  Sequence* sequence = nullptr;
  BlockCopy blocks;

  bool operator==(const PlannedCopy&) const = default;
};

/// A beam that is given up: its sequence goes on as another of its request does.
struct BeamMove {
  const Sequence* from = nullptr;
  Sequence* to = nullptr;
};

/// A request whose adapter could not be loaded.
struct FailedStart {
  Sequence* sequence = nullptr;
  std::string reason;
};

/// One step. Reused from step to step so that planning allocates nothing.
struct StepPlan {
  std::vector<PlannedSequence> entries;  ///< decodes first
  /// To be made in this order before the step writes anything; of sequences that run, planned or not.
  std::vector<PlannedCopy> copies;
  std::vector<Sequence*> started;  ///< began or resumed to run
  std::vector<Sequence*> encoded;  ///< of `started`, those whose encoder inputs the step computes
  /// Lost their blocks and lease, and wait again. A plan that pauses starts nothing.
  std::vector<Sequence*> paused;
  /// Waiting, with an adapter that gets no pages although no running request holds any (others are pinned):
  /// it cannot be served. The executor removes them, with an error.
  std::vector<Sequence*> unservable;
  /// Waiting, with an adapter that could not be loaded. The executor removes them, with an error.
  std::vector<FailedStart> failed;
  /// Requests wait for loads that are under way: LoraCacheOptions::on_load_end tells when to plan again.
  bool awaits_loads = false;
  std::int32_t num_tokens = 0;          ///< drafts included
  std::int32_t num_encoder_tokens = 0;  ///< of the inputs of `encoded`
  std::int32_t num_draft_tokens = 0;
  std::int32_t num_context_tokens = 0;
  std::int32_t num_context_sequences = 0;
  std::int32_t num_generation_sequences = 0;

  [[nodiscard]] bool empty() const { return entries.empty(); }
  void clear();
};

/// In-flight batching: decides before each step which sequences compute which tokens. Not thread-safe.
///
/// Decodes come first, then prompts that run already, then those that wait, in WaitingQueue's order. A
/// request for which there are no KV blocks, or no tokens left in the step, holds back those behind it. One
/// whose adapter is still being loaded does not: it starts with the first plan that finds the adapter there.
/// Nor does one whose adapter gets no pages, up to SchedulerLimits::max_times_passed_over.
///
/// Where the LoRA cache has load workers, each plan asks for the adapters of the requests that come next, as
/// many as could run at once, in their order: none is evicted for a request that comes after its own. A
/// static batch begins when the adapters that are on their way for it have come.
///
/// A request's sequences begin as one: when its prompt is computed the others are forked from it. They share
/// its blocks and its lease, and are sequences like any other from then on: each is paused, resumed and
/// removed on its own. The first one starts when there is room in the batch for all of them and, where
/// nothing is paused, KV blocks for all that they may generate. Beams are such sequences too; blocks are kept
/// for them whatever the policy.
///
/// A sequence with an encoder input starts in a step that computes all of it, unless what the decoder sees of
/// it is there, or is computed for another one that starts with the step. It holds blocks for that, from a
/// pool of their own, until it is paused or ends. A step has max_num_tokens of encoder inputs beside those of
/// its other tokens.
///
/// Where the pool has no blocks, the engine keeps no KV: a sequence holds none, and starts in a step that has
/// room for all of its tokens, whatever the limits say of chunks.
///
/// What a step has left over goes to drafts of its sequences, one of each in turn. They take no token and no
/// block from anything else: blocks within what is promised to their sequence, or, with kMaxUtilization,
/// while nobody waits and every running sequence could have one more.
class Scheduler {
 public:
  /// `lora_cache` may be nullptr when no sequence has an adapter, `cross_pool` when none has an encoder
  /// input. All must outlive the scheduler and its sequences. Throws ConfigError for limits that are not
  /// positive and for config.validate()'s problems.
  Scheduler(const SchedulerConfig& config, const SchedulerLimits& limits, BlockPool& block_pool,
            LoraCache* lora_cache, CrossBlockPool* cross_pool = nullptr);

  /// Why a request of this size and number of sequences, or beams, could not run even if it were alone, with
  /// the numbers; nullopt when it could. Adapters that never fit are refused by LoraCache::admit().
  [[nodiscard]] std::optional<std::string> why_never_fits(std::int64_t prompt_length, std::int64_t max_tokens,
                                                          std::int32_t num_sequences = 1,
                                                          bool are_beams = false,
                                                          std::int64_t encoder_length = 0) const;

  /// Queues a sequence. Throws RequestError when why_never_fits(), or when tokens is not the prompt, or when
  /// it has an adapter and there is no LoRA cache; it is not queued then.
  void add(Sequence& sequence);

  /// Decides the next step. Sequences that start get blocks and a lease here, and are planned here.
  /// An empty plan means that nothing can run now: nothing is queued, or only sequences that are unservable,
  /// have failed, or wait for loads.
  void plan(StepPlan& plan);

  /// The step has run: its tokens and the drafts that were right count as computed, and their full blocks can
  /// be reused. Call before the sequences of the plan are removed; tokens may be appended before or after,
  /// those of sequences with planned drafts before.
  void commit(const StepPlan& plan);

  /// Forks `child` from `parent`, which runs and whose tokens so far were computed by the step that was just
  /// committed. `child` is as before add(), has the parent's prompt, adapter and salt, and beside the
  /// parent's computed tokens one or more of its own. It runs from now on, or waits as if it had been paused
  /// when blocks have run out.
  void fork(Sequence& parent, Sequence& child);
  /// No more sequences are forked from `parent`: the room kept for them is given up.
  static void end_forks(Sequence& parent) { parent.num_forks = 0; }

  /// Each `to` gives its blocks back and goes on from what `from` has computed; no sequence is both. To be
  /// called after the commit of the step that computed the last of the request's beams; their next tokens may
  /// be appended before or after.
  void move_beams(std::span<const BeamMove> moves);

  /// The step has failed: removes its sequences, those of its copies too; nothing that it may have written is
  /// reused.
  void fail(const StepPlan& plan);

  /// Forgets a sequence in any state (finished, cancelled), not between plan() and commit() or fail(): gives
  /// back its blocks, of which full ones stay cached, and its lease.
  void remove(Sequence& sequence);

  /// In order of priority, then of arrival or, with adapter_fairness, of their first start, then of index.
  [[nodiscard]] std::span<Sequence* const> running() const { return running_; }
  struct Before {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };
  [[nodiscard]] const WaitingQueue& waiting() const { return waiting_; }
  [[nodiscard]] std::int32_t num_paused() const { return num_paused_; }
  /// Copies that no step has made yet.
  [[nodiscard]] std::span<const PlannedCopy> pending_copies() const { return copies_; }
  /// Sequences that will be forked from running ones.
  [[nodiscard]] std::int32_t num_promised_forks() const;
  [[nodiscard]] bool empty() const { return running_.empty() && waiting_.empty(); }
  /// nullptr: there is no encoder.
  [[nodiscard]] const CrossBlockPool* cross_pool() const { return cross_pool_; }
  [[nodiscard]] const SchedulerConfig& config() const { return config_; }
  [[nodiscard]] const SchedulerLimits& limits() const { return limits_; }
  /// Blocks, besides those that they have, that starting sequences must leave to the running ones: for all
  /// that they may generate, or, with kMaxUtilization, for the tokens that they have unless they are beams.
  [[nodiscard]] std::int64_t num_promised_blocks() const;
  /// Blocks, besides those that they have, that no other sequence may take from running beams.
  [[nodiscard]] std::int64_t num_kept_blocks() const;

 private:
  enum class StartResult : std::uint8_t { kStarted, kFailed, kPassedOver, kNoRoom };

  void plan_entries(StepPlan& plan);
  void plan_decodes(StepPlan& plan);
  void plan_running_prefills(StepPlan& plan);
  void collect_failed_loads(StepPlan& plan) const;
  void start_waiting(StepPlan& plan, bool may_start);
  /// Is any adapter of the requests that may run next on its way?
  [[nodiscard]] bool next_are_loading(const StepPlan& plan);
  [[nodiscard]] AdapterReadiness readiness_of(const Sequence& sequence);
  StartResult try_start(Sequence& sequence, StepPlan& plan);
  /// Whether the step has room for the sequence's encoder input, and the pool for what the decoder sees of
  /// it, or neither is needed.
  [[nodiscard]] bool has_encoder_room(const Sequence& sequence, const StepPlan& plan) const;
  /// Whether it may do without its encoder input's computation.
  [[nodiscard]] static bool may_reuse_encoder_input(const Sequence& sequence);
  /// Gives a sequence that starts the blocks of its encoder input.
  void take_cross_blocks(Sequence& sequence, StepPlan& plan);
  void pass_over(Sequence& sequence, AdapterReadiness readiness, StepPlan& plan);
  void start(Sequence& sequence, std::optional<DeviceLease> lease, StepPlan& plan);
  void run(Sequence& sequence);
  void pause(Sequence& sequence);
  /// Gives a sequence that starts what is known of its tokens.
  void reuse_blocks(Sequence& sequence);
  void add_to_plan(Sequence& sequence, std::int32_t count, bool is_prefill, StepPlan& plan);
  void grow_entry(PlannedSequence& entry, std::int32_t count, StepPlan& plan);
  /// Gives the tokens that the step has left to its prefills, in equal shares.
  void share_out_tokens(StepPlan& plan);
  void plan_drafts(StepPlan& plan);
  /// Blocks that drafts may take.
  [[nodiscard]] std::int64_t num_spare_blocks() const;
  /// False when there is no room for it.
  bool add_draft(PlannedSequence& entry, std::int64_t& num_spare_blocks);
  void charge(Sequence& sequence, std::int32_t num_tokens);
  /// Tells the pool what the request says of its indexed blocks from `first` on.
  void retain_blocks(const Sequence& sequence, std::int32_t first);
  void pause(Sequence& sequence, StepPlan& plan);
  void stop_running(Sequence& sequence);
  bool pause_a_prefill_after(std::size_t index, StepPlan& plan);
  /// The last that runs and is not a beam; there is one.
  [[nodiscard]] Sequence& next_to_pause() const;
  [[nodiscard]] std::int32_t room_for(const Sequence& sequence) const;
  [[nodiscard]] std::int64_t blocks_wanted(const Sequence& sequence) const;
  /// Its part of num_kept_blocks().
  [[nodiscard]] std::int64_t kept_for(const Sequence& sequence) const;
  /// Whether a fork of a sequence takes no block that is kept for beams.
  [[nodiscard]] bool leaves_kept_blocks(const Sequence& parent) const;
  /// Blocks that a sequence of this size can come to need, and those forked from it.
  [[nodiscard]] std::int64_t blocks_of_all(std::int64_t prompt_length, std::int64_t max_tokens,
                                           std::int32_t num_forks) const;
  [[nodiscard]] bool may_pause() const {
    return config_.capacity_scheduler_policy == CapacitySchedulerPolicy::kMaxUtilization;
  }
  /// In one step, and without blocks.
  [[nodiscard]] bool computes_sequences_whole() const { return block_pool_.num_blocks() == 0; }
  [[nodiscard]] bool looks_ahead() const { return lora_cache_ != nullptr && lora_cache_->has_load_workers(); }
  [[nodiscard]] bool any_lease() const;
  [[nodiscard]] bool shares_blocks(const Sequence& sequence) const;
  [[nodiscard]] bool starts_from_shared_blocks(const Sequence& sequence) const;
  [[nodiscard]] std::int32_t tokens_left(const StepPlan& plan) const;

  SchedulerConfig config_;
  SchedulerLimits limits_;
  BlockPool& block_pool_;
  LoraCache* lora_cache_;
  CrossBlockPool* cross_pool_;
  std::vector<Sequence*> running_;
  std::vector<PlannedCopy> copies_;
  WaitingQueue waiting_;
  std::uint64_t next_arrival_ = 0;
  std::uint64_t next_place_ = 0;
  /// Tokens that a prefill takes before the others have had theirs.
  std::int32_t chunk_unit_;
  std::int32_t num_paused_ = 0;
  std::uint64_t turn_ = 0;  // number of the plan being made
  // Of the plan being made:
  std::vector<Sequence*> skipped_;  // their adapters get no pages
  bool may_lease_ = true;           // nobody ahead was passed over too often
  std::int32_t num_loading_ = 0;    // requests that wait for their adapters' loads
  std::int64_t num_kept_ = 0;       // num_kept_blocks(), where sequences may be paused
};

}  // namespace adaptrt
