#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/kv/block_pool.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

class DraftEngine;

/// A sequence as the draft engine knows it: what it has computed of the sequence's text, in blocks of its
/// own.
class DraftSequence {
 public:
  DraftSequence() = default;
  ~DraftSequence();
  DraftSequence(const DraftSequence&) = delete;
  DraftSequence& operator=(const DraftSequence&) = delete;

  /// Before its first drafts: an adapter of the draft engine's cache, or nullptr, and the salt of KV reuse.
  void set(std::shared_ptr<const HostAdapter> adapter, std::optional<std::uint64_t> cache_salt);

 private:
  friend class DraftEngine;

  /// Counts the drafts that came to be in `text`, whose KV is there; one token at least is left to compute.
  void keep_right_drafts(std::span<const std::int32_t> text);
  [[nodiscard]] ReuseKey reuse_key() const;

  std::shared_ptr<const HostAdapter> adapter_;
  std::optional<std::uint64_t> cache_salt_;
  /// Its adapter could not be loaded: it has no drafts any more.
  bool is_given_up_ = false;
  // While it has blocks:
  DraftEngine* holder_ = nullptr;
  BlockTable table_;
  std::optional<DeviceLease> lease_;
  std::int32_t num_computed_ = 0;              // tokens of the text
  std::vector<std::int32_t> computed_drafts_;  // behind them, by the last call
  std::uint64_t turn_ = 0;                     // number of that call
};

/// The drafts of one sequence that are asked for.
struct DraftTask {
  DraftSequence* sequence = nullptr;
  /// Prompt and generated tokens; begins with what it was when drafts were last asked for.
  std::span<const std::int32_t> text;
  std::int32_t prompt_length = 0;
  std::int32_t most = 1;                        ///< at least 1
  std::vector<std::int32_t>* drafts = nullptr;  ///< cleared and filled; has room for them
};

/// Counters and current contents of a draft engine.
struct DraftEngineStats {
  std::size_t mem_usage = 0;  ///< bytes of its KV pool and its LoRA cache
  std::int64_t max_num_blocks = 0;
  std::int64_t used_num_blocks = 0;
  std::int64_t num_sequences = 0;  ///< that have blocks
  std::int64_t num_steps = 0;
  std::int64_t num_tokens = 0;  ///< that it computed, drafts included
  double seconds = 0.0;
  std::string error;  ///< why it was given up; empty: it was not

  bool operator==(const DraftEngineStats&) const = default;
};

/// A second engine, small, that guesses the next tokens of sequences greedily, with KV blocks and adapters of
/// its own. Nothing but speed depends on what it guesses, so it plans as simply as it can: no request waits
/// for it, and no request fails of it. Belongs to one thread; a call without new sequences allocates nothing.
///
/// Each call is a step that computes what the engine has not seen of the texts, as far as one step reaches,
/// and for those that it has seen to the end steps that add a draft each, all sequences together. The texts
/// with the fewest missing tokens come first, so that a long prompt, which takes several calls, does not
/// delay others.
///
/// A sequence gets blocks for all drafts of a call at once, or has none in that call. Where blocks have run
/// out, those of the sequence that was asked for least recently are taken, of equals the one that came last;
/// never those of one that came before in the same call. Full blocks stay cached by their text, for sequences
/// that begin with it.
class DraftEngine {
 public:
  /// Both outlive this; `lora_cache` is nullptr without adapters, and has no load workers. The engine has
  /// allocated `num_kv_blocks` blocks before draft() is called.
  DraftEngine(Engine& engine, LoraCache* lora_cache, std::int32_t num_kv_blocks, std::int32_t max_draft_len);
  ~DraftEngine();
  DraftEngine(const DraftEngine&) = delete;
  DraftEngine& operator=(const DraftEngine&) = delete;

  /// Tasks in the order in which they get blocks, each of another sequence. Those for which there is no room,
  /// or whose text is too long for the engine or not computed yet, get none. When the engine fails, none get
  /// any from then on.
  void draft(std::span<const DraftTask> tasks);
  /// Takes the sequence's blocks and its adapter; they are given again when drafts are asked for.
  void release(DraftSequence& sequence);

  [[nodiscard]] DraftEngineStats stats() const;
  /// Everything that does not hold between sequences and blocks; empty when all is well. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants() const;

 private:
  struct Entry {
    const DraftTask* task = nullptr;
    std::int32_t most = 0;
    std::int32_t num_to_compute = 0;
  };
  /// The arrays of a StepInput, and whose drafts its rows of logits are.
  struct Step {
    std::vector<std::int32_t> token_ids;
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> sequence_offsets;
    std::vector<std::int32_t> prompt_lengths;
    std::vector<std::int32_t> block_tables;
    std::vector<const DeviceAdapter*> adapters;
    std::vector<std::int32_t> logit_rows;
    std::vector<std::vector<std::int32_t>*> drafts;
  };

  void plan(std::span<const DraftTask> tasks);
  /// Gives the sequence blocks for its text and the drafts; false when it cannot have them now.
  [[nodiscard]] bool prepare(const DraftTask& task, std::int32_t most);
  [[nodiscard]] bool begin(const DraftTask& task);
  [[nodiscard]] bool make_room(const DraftSequence& sequence, std::int32_t num_tokens);
  [[nodiscard]] DraftSequence* next_to_lose_blocks() const;
  void compute_texts();
  /// Another draft of each sequence; false when all have theirs.
  bool compute_drafts();
  void clear_step();
  void add_to_step(const DraftTask& task, std::span<const std::int32_t> tokens, std::int32_t position,
                   bool wants_draft);
  void run_step();
  void give_up(std::span<const DraftTask> tasks, std::string reason);

  Engine& engine_;
  LoraCache* lora_cache_;
  BlockPool block_pool_;
  std::int32_t max_draft_len_;
  std::vector<DraftSequence*> sequences_;  // with blocks, in the order in which they got the first
  std::vector<Entry> entries_;             // of the call
  Step step_;
  std::uint64_t turn_ = 0;
  DraftEngineStats stats_;
};

}  // namespace adaptrt
