#pragma once

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/kv/sequence_memory.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/pack_adapter.h"
#include "adaptrt/sched/invariants.h"
#include "adaptrt/sched/scheduler.h"
#include "lora/adapters.h"
#include "lora/hooked_pages.h"

namespace adaptrt::testing {

struct WorldConfig {
  std::int32_t num_blocks = 64;
  std::int32_t tokens_per_block = 4;
  bool enable_block_reuse = true;
  PartialReuse partial_reuse = PartialReuse::kNone;
  CapacitySchedulerPolicy policy = CapacitySchedulerPolicy::kGuaranteedNoEvict;
  ContextChunkingPolicy chunking = ContextChunkingPolicy::kFirstComeFirstServed;
  bool adapter_fairness = true;
  SchedulerLimits limits{.max_batch_size = 8,
                         .max_num_tokens = 32,
                         .enable_chunked_context = true,
                         .max_reusable_prompt_len = 1 << 20};
  /// 0: no encoder; otherwise every request has an encoder input.
  std::int32_t num_cross_blocks = 0;
  /// True for an engine that keeps states; the number of snapshots of them.
  bool has_states = false;
  std::int32_t num_state_snapshots = 0;
  /// Device pages of the LoRA cache; 0 for no cache.
  std::int64_t device_pages = 0;
  /// Number of load workers, and the hook that they call in each load.
  std::int32_t num_load_workers = 0;
  HookedPages::Hook in_load = [] {};
};

struct RequestOptions {
  std::shared_ptr<const HostAdapter> adapter = nullptr;
  float priority = 0.5F;
  std::optional<std::uint64_t> cache_salt = std::nullopt;
  bool compute_whole_prompt = false;
  std::shared_ptr<const KvCacheRetentionConfig> retention = nullptr;
  std::int32_t num_sequences = 1;
  /// True for the beams of a search.
  bool are_beams = false;
  EncoderTokens encoder_tokens = nullptr;
  bool compute_encoder_input = false;
};

inline SchedulerLimits limits(std::int32_t max_batch_size, std::int32_t max_num_tokens, bool chunked = true) {
  return {.max_batch_size = max_batch_size,
          .max_num_tokens = max_num_tokens,
          .enable_chunked_context = chunked,
          .max_reusable_prompt_len = 1 << 20};
}

/// An executor without an engine. Its "model" is a hash of everything that a token may depend on: the adapter
/// and the earlier tokens. It also writes a stand-in for each block's KV, and checks in every step that each
/// planned token reads exactly the KV of its predecessors. The state of a sequence is the hash of all its
/// computed tokens.
class World {
 public:
  explicit World(const WorldConfig& config)
      : memory({.num_blocks = config.num_blocks,
                .tokens_per_block = config.tokens_per_block,
                .num_cross_blocks = config.num_cross_blocks,
                .enable_block_reuse = config.enable_block_reuse,
                .partial_reuse = config.partial_reuse,
                .num_state_slots = config.has_states ? config.limits.max_batch_size : 0,
                .num_state_snapshots = config.num_state_snapshots}),
        cache_(config.device_pages > 0 ? make_cache(config) : nullptr),
        scheduler({.capacity_scheduler_policy = config.policy,
                   .context_chunking_policy = config.chunking,
                   .adapter_fairness = config.adapter_fairness},
                  config.limits, memory, cache_.get()),
        kv_(static_cast<std::size_t>(config.num_blocks) * config.tokens_per_block),
        cross_kv_(static_cast<std::size_t>(config.num_cross_blocks)),
        states_(config.has_states
                    ? static_cast<std::size_t>(config.limits.max_batch_size + config.num_state_snapshots)
                    : 0) {}

  /// Makes an adapter of `pages` device pages, one per layer; each task has different weights.
  std::shared_ptr<const HostAdapter> adapter(std::uint64_t task_id, std::int32_t pages = 1) {
    const LoraLayout layout = one_module_layout();
    std::vector<SentRow> rows;
    for (std::int32_t layer = 0; layer < pages; ++layer) {
      rows.push_back({.module = LoraModule::kAttnDense, .layer = layer, .rank = layout.max_rank});
    }
    auto admitted =
        cache_->admit(make_adapter(rows, layout, static_cast<std::uint32_t>(task_id)).send(task_id));
    BOOST_TEST_REQUIRE(cache_->pages_needed(*admitted) == pages);
    return admitted;
  }

  Sequence& make(std::vector<std::int32_t> prompt, std::int32_t max_tokens, const RequestOptions& options) {
    auto owned = std::make_unique<Sequence>();
    Sequence& sequence = *owned;
    sequence.id = next_id_++;
    sequence.prompt_length = static_cast<std::int32_t>(prompt.size());
    sequence.max_tokens = max_tokens;
    sequence.tokens = std::move(prompt);
    sequence.adapter = options.adapter;
    sequence.priority = options.priority;
    sequence.cache_salt = options.cache_salt;
    sequence.compute_whole_prompt = options.compute_whole_prompt;
    sequence.retention = options.retention;
    sequence.encoder_tokens = options.encoder_tokens;
    sequence.compute_encoder_input = options.compute_encoder_input;
    sequence.num_forks = max_tokens == 1 ? 0 : options.num_sequences - 1;
    sequence.is_beam = options.are_beams;
    if (sequence.is_beam) beams_[sequence.id] = {&sequence};
    sequences_[sequence.id] = std::move(owned);
    return sequence;
  }
  Sequence& add(std::vector<std::int32_t> prompt, std::int32_t max_tokens,
                const RequestOptions& options = {}) {
    Sequence& sequence = make(std::move(prompt), max_tokens, options);
    scheduler.add(sequence);
    require_sound();
    return sequence;
  }
  Sequence& add(std::int32_t prompt_length, std::int32_t max_tokens, const RequestOptions& options = {}) {
    std::vector<std::int32_t> prompt(prompt_length);
    for (auto& token : prompt) token = next_token_++;
    return add(std::move(prompt), max_tokens, options);
  }

  /// Runs one step: plans, computes, commits, and removes sequences that reached max_tokens. Returns the
  /// plan.
  const StepPlan& step() {
    plan_only();
    run_planned();
    return plan;
  }
  void run_planned() {
    for (const PlannedCopy& planned : plan.copies) copy(planned.blocks);
    for (const PlannedStateCopy& planned : plan.state_copies) state_at(planned.to) = state_at(planned.from);
    for (const Sequence* sequence : plan.encoded) encode(*sequence);
    for (const PlannedSequence& entry : plan.entries) compute(entry);
    for (const PlannedSequence& entry : plan.entries) {
      if (entry.num_drafts > 0) generate(entry);
    }
    scheduler.commit(plan);
    require_sound();
    for (const PlannedSequence& entry : plan.entries) {
      if (!entry.wants_logits) continue;
      Sequence& sequence = *entry.sequence;
      if (sequence.is_beam) continue;
      fork_all(sequence);
      if (entry.num_drafts == 0) generate(entry);
      if (make_drafts) make_drafts(sequence);
      if (sequence.num_generated() < sequence.max_tokens) continue;
      require_right_tokens(sequence);
      scheduler.remove(sequence);
      retire(sequence);
      ++num_finished;
    }
    for (const PlannedSequence& entry : plan.entries) {
      if (entry.sequence->is_beam) select_beams(entry.sequence->id);
    }
    require_sound();
  }
  /// Plans until there is something to do: waits for loads if needed, and removes requests whose loads have
  /// failed.
  void plan_only() {
    for (;;) {
      const int loads_before = load_ends.count();
      plan_once();
      for (const FailedStart& failed : plan.failed) {
        ++num_failed;
        cancel(*failed.sequence);
      }
      if (!plan.empty() || !plan.unservable.empty() || !plan.preempted.empty() || scheduler.empty()) return;
      if (plan.failed.empty()) {
        BOOST_TEST_REQUIRE(plan.awaits_loads);
        load_ends.await(loads_before + 1);
      }
    }
  }
  void plan_once() {
    scheduler.plan(plan);
    require_sound();
    require(check_invariants(plan, scheduler));
  }
  /// Fails the planned step.
  void fail_step() {
    constexpr std::uint64_t kGarbage = 0xdead;
    for (const PlannedStateCopy& copy : plan.state_copies) state_at(copy.to) = kGarbage;
    if (!states_.empty()) {
      for (const PlannedSequence& entry : plan.entries)
        state_at(entry.sequence->memory.states.slot) = kGarbage;
    }
    scheduler.fail(plan);
    require_sound();
    for (const PlannedSequence& entry : plan.entries) give_up(*entry.sequence);
    for (const PlannedCopy& copy : plan.copies) give_up(*copy.sequence);
    for (const PlannedStateCopy& copy : plan.state_copies) {
      if (copy.sequence != nullptr) give_up(*copy.sequence);
    }
  }
  /// Cancels the sequence and all beams of its request.
  void cancel(Sequence& sequence) {
    scheduler.remove(sequence);
    require_sound();
    give_up(sequence);
  }
  /// Runs steps until nothing is left; each step must do something.
  void run_to_the_end() {
    while (!scheduler.empty()) {
      step();
      BOOST_TEST_REQUIRE(!plan.empty());
    }
  }
  /// Returns the tokens that the sequence will generate next.
  static std::vector<std::int32_t> coming_tokens(const Sequence& sequence, std::int32_t count) {
    std::vector<std::int32_t> tokens = sequence.tokens;
    for (std::int32_t i = 0; i < count; ++i) tokens.push_back(next_token(sequence, tokens));
    tokens.erase(tokens.begin(), tokens.begin() + sequence.num_tokens());
    return tokens;
  }
  void require_sound() { require(check_invariants(scheduler, cache_.get())); }
  [[nodiscard]] LoraCache& cache() { return *cache_; }
  /// Returns a sequence in any state.
  [[nodiscard]] Sequence& any_sequence(std::uint64_t number) { return *sequences_.at(number % next_id_); }
  [[nodiscard]] std::uint64_t num_made() const { return next_id_; }
  [[nodiscard]] bool plans(const Sequence& sequence) const {
    return std::ranges::any_of(plan.entries, [&](const auto& entry) { return entry.sequence == &sequence; });
  }

  /// Returns the KV of a position that the sequence has a block for.
  std::uint64_t& kv_at(const Sequence& sequence, std::int32_t position) {
    const std::int32_t size = memory.tokens_per_block();
    const BlockId block = sequence.memory.blocks()[position / size];
    return kv_[static_cast<std::size_t>(block) * size + position % size];
  }
  /// Returns the sequences of a request with beams.
  [[nodiscard]] const std::vector<Sequence*>& beams_of(const Sequence& first) const {
    return beams_.at(first.id);
  }

 private:
  static LoraLayout one_module_layout() {
    LoraLayout layout;
    layout.num_layers = 8;
    layout.max_rank = 4;
    layout.target_modules = {LoraModule::kAttnDense};
    for (std::int32_t layer = 0; layer < layout.num_layers; ++layer) {
      layout.sites.push_back({layer, 6, {{LoraModule::kAttnDense, 8}}});
    }
    return layout;
  }
  std::unique_ptr<LoraCache> make_cache(const WorldConfig& config) {
    const LoraLayout layout = one_module_layout();
    const ModuleRank largest{
        .module = LoraModule::kAttnDense, .rank = layout.max_rank, .vectors = {false, layout.shifts_enabled}};
    const std::size_t page_bytes = image_bytes(layout, layout.sites[0], std::span(&largest, 1));
    return std::make_unique<LoraCache>(
        layout, std::make_unique<HookedPages>(page_bytes, config.device_pages, config.in_load),
        LoraCacheOptions{.host_bytes = 1 << 20,
                         .num_load_workers = config.num_load_workers,
                         .on_load_end = [this] { load_ends.add(); }});
  }

  /// Ends the request: its adapter may leave the cache.
  static void retire(Sequence& sequence) { sequence.adapter.reset(); }
  static void require(const std::vector<std::string>& violations) {
    for (const auto& violation : violations) BOOST_ERROR(violation);
    if (!violations.empty()) throw std::runtime_error("the invariants do not hold");
  }

  /// Called after the removal of a sequence.
  void give_up(Sequence& sequence) {
    retire(sequence);
    if (!sequence.is_beam) return;
    for (Sequence* beam : beams_.at(sequence.id)) {
      scheduler.remove(*beam);
      retire(*beam);
    }
    require_sound();
  }
  /// Called after all beams of a request are computed: some are dropped for others until they have
  /// max_tokens.
  void select_beams(std::uint64_t request) {
    auto& beams = beams_.at(request);
    Sequence& first = *beams.front();
    const auto is_computed = [](const Sequence* beam) { return beam->num_to_compute() == 0; };
    if (first.state != SequenceState::kRunning || !std::ranges::all_of(beams, is_computed)) return;
    if (first.num_generated() + 1 == first.max_tokens) {
      for (Sequence* beam : beams) {
        scheduler.remove(*beam);
        retire(*beam);
        ++num_finished;
      }
      return;
    }
    std::uint64_t random = hash(first, first.num_tokens());
    const auto draw = [&](std::size_t count) {
      return (random = random * 6364136223846793005ULL + 1442695040888963407ULL) % (count << 33) >> 33;
    };
    if (first.num_forks > 0) {
      while (first.num_forks > 0) {
        Sequence& child = make(first.tokens, first.max_tokens,
                               {.adapter = first.adapter,
                                .priority = first.priority,
                                .cache_salt = first.cache_salt,
                                .encoder_tokens = first.encoder_tokens});
        child.id = first.id;
        child.index = static_cast<std::int32_t>(beams.size());
        child.is_beam = true;
        child.tokens.push_back(static_cast<std::int32_t>(draw(5)));
        scheduler.fork(first, child);
        beams.push_back(&child);
      }
      first.tokens.push_back(static_cast<std::int32_t>(draw(5)));
      return;
    }
    const std::size_t num_staying = 1 + draw(beams.size());
    std::vector<Sequence*> order = beams;
    for (std::size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[draw(i + 1)]);
    std::vector<BeamMove> moves;
    for (std::size_t i = num_staying; i < order.size(); ++i) {
      moves.push_back({.from = order[draw(num_staying)], .to = order[i]});
      order[i]->tokens = moves.back().from->tokens;
    }
    scheduler.move_beams(moves);
    for (Sequence* beam : beams) beam->tokens.push_back(static_cast<std::int32_t>(draw(5)));
  }

  /// Forks the promised sequences, each with its own first token.
  void fork_all(Sequence& parent) {
    for (std::int32_t index = 1; parent.num_forks > 0; ++index) {
      Sequence& child = make(parent.tokens, parent.max_tokens,
                             {.adapter = parent.adapter,
                              .priority = parent.priority,
                              .cache_salt = parent.cache_salt,
                              .encoder_tokens = parent.encoder_tokens});
      child.index = index;
      child.tokens.push_back(next_token(child, child.num_tokens()));
      scheduler.fork(parent, child);
      require_sound();
    }
  }

  /// Hashes tokens under the sequence's adapter.
  static std::uint64_t hash(const Sequence& sequence, std::span<const std::int32_t> tokens) {
    std::uint64_t value = sequence.reuse_key().adapter_generation + 1;
    for (const std::int32_t token : tokens) {
      value = (value ^ static_cast<std::uint32_t>(token)) * 0x9e3779b97f4a7c15ULL;
      value ^= value >> 29;
    }
    return value;
  }
  static std::uint64_t hash(const Sequence& sequence, std::int32_t length) {
    return hash(sequence, std::span(sequence.tokens).first(static_cast<std::size_t>(length)));
  }
  static std::int32_t next_token(const Sequence& sequence, std::span<const std::int32_t> tokens) {
    return static_cast<std::int32_t>((hash(sequence, tokens) + static_cast<std::uint64_t>(sequence.index)) %
                                     5);
  }
  static std::int32_t next_token(const Sequence& sequence, std::int32_t length) {
    return next_token(sequence, std::span(sequence.tokens).first(static_cast<std::size_t>(length)));
  }
  /// Generates the next token, and further ones as long as the planned drafts are right.
  void generate(const PlannedSequence& entry) {
    Sequence& sequence = *entry.sequence;
    for (std::int32_t i = 0;; ++i) {
      sequence.tokens.push_back(next_token(sequence, sequence.num_tokens()));
      if (i == entry.num_drafts || sequence.tokens.back() != sequence.drafts[i]) return;
      ++num_right_drafts;
    }
  }
  void copy(const BlockCopy& blocks) {
    const auto first_of = [&](BlockId block) {
      return kv_.begin() + std::ptrdiff_t{block} * memory.tokens_per_block();
    };
    std::copy_n(first_of(blocks.from), memory.tokens_per_block(), first_of(blocks.to));
  }
  std::uint64_t& state_at(StateSlot slot) { return states_.at(static_cast<std::size_t>(slot)); }
  /// Advances the state of a planned sequence over its tokens and drafts.
  void advance_state(const PlannedSequence& entry) {
    if (states_.empty()) return;
    std::uint64_t& state = state_at(entry.sequence->memory.states.slot);
    if (entry.first_token > 0) {
      BOOST_TEST_REQUIRE(state == hash(*entry.sequence, entry.first_token), "another state is read");
    }
    const Sequence& sequence = *entry.sequence;
    std::vector<std::int32_t> tokens(sequence.tokens.begin(), sequence.tokens.begin() + entry.end());
    tokens.insert(tokens.end(), sequence.drafts.begin(), sequence.drafts.begin() + entry.num_drafts);
    state = hash(sequence, tokens);
  }
  /// Writes the encoder's result for a sequence's input.
  void encode(const Sequence& sequence) {
    for (const BlockId block : sequence.memory.cross->blocks()) {
      cross_kv_[static_cast<std::size_t>(block)] = hash(sequence, *sequence.encoder_tokens);
    }
  }
  void compute(const PlannedSequence& entry) {
    const Sequence& sequence = *entry.sequence;
    for (const BlockId block :
         sequence.memory.cross ? sequence.memory.cross->blocks() : std::vector<BlockId>{}) {
      BOOST_TEST_REQUIRE(
          cross_kv_[static_cast<std::size_t>(block)] == hash(sequence, *sequence.encoder_tokens),
          "another's encoder input is read");
    }
    if (memory.num_blocks() == 0) {
      BOOST_TEST_REQUIRE(entry.first_token == 0);
      BOOST_TEST_REQUIRE(entry.end() == sequence.num_tokens());
      return;
    }
    advance_state(entry);
    for (std::int32_t i = 0; i < entry.first_token; ++i) {
      BOOST_TEST_REQUIRE(kv_at(sequence, i) == hash(sequence, i + 1), "KV of another content is read");
    }
    for (std::int32_t i = entry.first_token; i < entry.first_token + entry.count; ++i) {
      kv_at(sequence, i) = hash(sequence, i + 1);
    }
    std::vector<std::int32_t> tokens(sequence.tokens.begin(), sequence.tokens.begin() + entry.end());
    for (std::int32_t i = 0; i < entry.num_drafts; ++i) {
      tokens.push_back(sequence.drafts[i]);
      kv_at(sequence, entry.end() + i) = hash(sequence, tokens);
    }
  }
  static void require_right_tokens(const Sequence& sequence) {
    for (std::int32_t i = sequence.prompt_length; i < sequence.num_tokens(); ++i) {
      BOOST_TEST_REQUIRE(sequence.tokens[i] == next_token(sequence, i));
    }
  }

 public:
  SequenceMemoryPool memory;
  Counter load_ends;

 private:
  std::unique_ptr<LoraCache> cache_;

 public:
  Scheduler scheduler;
  StepPlan plan;
  std::int64_t num_finished = 0;
  std::int64_t num_failed = 0;
  /// Makes the drafts of a sequence with a new token; empty for no drafts.
  std::function<void(Sequence&)> make_drafts;
  std::int64_t num_right_drafts = 0;

 private:
  std::vector<std::uint64_t> kv_;
  std::vector<std::uint64_t> cross_kv_;  // by block
  std::vector<std::uint64_t> states_;    // by slot
  std::map<std::uint64_t, std::unique_ptr<Sequence>> sequences_;
  std::map<std::uint64_t, std::vector<Sequence*>> beams_;  // by request
  std::uint64_t next_id_ = 0;
  std::int32_t next_token_ = 1000;
};

/// Checks that one of the validator's problems contains these words.
inline void check_found(const std::vector<std::string>& problems, const std::string& words) {
  BOOST_TEST(
      std::ranges::any_of(problems, [&](const auto& text) { return text.find(words) != std::string::npos; }),
      words);
}

/// Returns the validator's problems for a copy of the world's plan after `damage`.
template <class Damage>
std::vector<std::string> problems_of_damaged_plan(const World& world, const Damage& damage) {
  StepPlan damaged = world.plan;
  damage(damaged);
  return check_invariants(damaged, world.scheduler);
}

}  // namespace adaptrt::testing
