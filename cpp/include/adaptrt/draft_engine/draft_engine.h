#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/kv/sequence_memory.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

class DraftEngine;

/// The draft engine's state of one sequence: the tokens that it has computed, in memory of its own.
class DraftSequence {
 public:
  DraftSequence() = default;
  ~DraftSequence();
  DraftSequence(const DraftSequence&) = delete;
  DraftSequence& operator=(const DraftSequence&) = delete;

  /// Call it before the first drafts. `adapter` is in the draft engine's cache, or nullptr; `cache_salt` is
  /// the salt of KV reuse.
  void set(std::shared_ptr<const HostAdapter> adapter, std::optional<std::uint64_t> cache_salt);

 private:
  friend class DraftEngine;

  /// Number of computed drafts that equal the tokens of `text`; at least one token stays to compute.
  [[nodiscard]] std::int32_t num_right_drafts(std::span<const std::int32_t> text) const;
  [[nodiscard]] ReuseKey reuse_key() const;

  std::shared_ptr<const HostAdapter> adapter_;
  std::optional<std::uint64_t> cache_salt_;
  /// True if its adapter could not be loaded; it gets no more drafts.
  bool is_given_up_ = false;
  // Valid while it has memory:
  DraftEngine* holder_ = nullptr;
  SequenceMemory memory_;  // its computed tokens are tokens of the text
  std::optional<DeviceLease> lease_;
  std::vector<std::int32_t> computed_drafts_;  // computed after these tokens, in the last call
  std::uint64_t turn_ = 0;                     // number of the last call
};

/// A request for drafts of one sequence.
struct DraftTask {
  DraftSequence* sequence = nullptr;
  /// Prompt and generated tokens; extends the text of the last call.
  std::span<const std::int32_t> text;
  std::int32_t prompt_length = 0;
  std::int32_t most = 1;                        ///< maximum number of drafts, at least 1
  std::vector<std::int32_t>* drafts = nullptr;  ///< cleared and filled; must have enough capacity
};

/// Counters and current contents of a draft engine.
struct DraftEngineStats {
  std::size_t mem_usage = 0;  ///< bytes of its KV pool and its LoRA cache
  std::int64_t max_num_blocks = 0;
  std::int64_t used_num_blocks = 0;
  std::int64_t num_sequences = 0;  ///< sequences that have blocks
  std::int64_t num_steps = 0;
  std::int64_t num_tokens = 0;  ///< computed tokens, including drafts
  double seconds = 0.0;
  std::string error;  ///< why it was given up; empty: it was not

  bool operator==(const DraftEngineStats&) const = default;
};

/// A second, small engine that drafts the next tokens of sequences greedily, with KV blocks and adapters of
/// its own. Drafts affect only speed, so it plans simply: no request waits for it, and none fails because of
/// it. It belongs to one thread. A call without new sequences allocates nothing.
///
/// The first step of each call computes the texts' missing tokens, as far as one step reaches. For complete
/// texts, further steps then add one draft each, all sequences together. The texts with the fewest missing
/// tokens come first, so that a long prompt, which takes several calls, does not delay others.
///
/// A sequence gets blocks for all drafts of a call at once, or no drafts in that call. If no block is free,
/// the engine evicts the blocks of the sequence that was asked for least recently (among equals, of the
/// newest sequence), but never those of an earlier task in the same call. Full blocks stay cached by their
/// text, for sequences that begin with it.
class DraftEngine {
 public:
  /// Both arguments must outlive this object. `lora_cache` is nullptr without adapters, and must have no load
  /// workers. The engine must have allocated `num_kv_blocks` blocks before draft() is called.
  DraftEngine(Engine& engine, LoraCache* lora_cache, std::int32_t num_kv_blocks, std::int32_t max_draft_len);
  ~DraftEngine();
  DraftEngine(const DraftEngine&) = delete;
  DraftEngine& operator=(const DraftEngine&) = delete;

  /// Drafts for `tasks`, in the order in which they get blocks, each of a different sequence. A task gets no
  /// drafts if there is no room, if its text is too long for the engine, or if the text is not computed yet.
  /// If the engine fails, no task gets drafts from then on.
  void draft(std::span<const DraftTask> tasks);
  /// Releases the sequence's blocks and adapter; it gets them again when drafts are next asked for.
  void release(DraftSequence& sequence);
  /// Forgets the KV blocks that later sequences could reuse.
  void reset_reuse() { memory_.reset_reuse(); }

  [[nodiscard]] DraftEngineStats stats() const;
  /// Lists every violated invariant of sequences and blocks; empty if none. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  struct Entry {
    const DraftTask* task = nullptr;
    std::int32_t most = 0;
    std::int32_t num_to_compute = 0;
  };
  /// The arrays of a StepInput, and the task of each row of logits.
  struct Step {
    std::vector<std::int32_t> token_ids;
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> sequence_offsets;
    std::vector<std::int32_t> prompt_lengths;
    std::vector<std::int32_t> block_tables;
    std::vector<const DeviceAdapter*> adapters;
    std::vector<std::int32_t> logit_rows;
    std::vector<std::int32_t> best_tokens;  // of these rows, from engines that find them
    std::vector<std::vector<std::int32_t>*> drafts;
  };

  void plan(std::span<const DraftTask> tasks);
  /// Gives the sequence blocks for its text and drafts; returns false if there are not enough now.
  [[nodiscard]] bool prepare(const DraftTask& task, std::int32_t most);
  [[nodiscard]] bool begin(const DraftTask& task);
  [[nodiscard]] bool make_room(const DraftSequence& sequence, std::int32_t num_tokens);
  [[nodiscard]] DraftSequence* next_to_lose_blocks() const;
  void compute_texts();
  /// Computes another draft of each sequence; returns false if all have theirs.
  bool compute_drafts();
  void clear_step();
  void add_to_step(const DraftTask& task, std::span<const std::int32_t> tokens, std::int32_t position,
                   bool wants_draft);
  void run_step();
  void give_up(std::span<const DraftTask> tasks, std::string reason);

  Engine& engine_;
  LoraCache* lora_cache_;
  SequenceMemoryPool memory_;
  std::int32_t max_draft_len_;
  std::vector<DraftSequence*> sequences_;  // with memory, in the order in which they got it
  std::vector<Entry> entries_;             // tasks of the current call
  Step step_;
  std::uint64_t turn_ = 0;
  DraftEngineStats stats_;
};

}  // namespace adaptrt
