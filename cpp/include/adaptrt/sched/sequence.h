#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "adaptrt/kv/block_pool.h"
#include "adaptrt/kv/cross_blocks.h"
#include "adaptrt/kv/retention.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

enum class SequenceState : std::uint8_t {
  kNew,       ///< not given to a scheduler yet
  kWaiting,   ///< holds no blocks and no lease; `paused` tells whether it ran before
  kRunning,   ///< holds blocks and, with an adapter, a lease
  kFinished,  ///< removed from the scheduler
};

/// One sequence of a request as the scheduler sees it. Belongs to the executor and stays where it is while a
/// scheduler knows it.
struct Sequence {
  Sequence() = default;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Set before Scheduler::add() and constant from then on.
  std::uint64_t id = 0;
  /// Among the sequences of its request.
  std::int32_t index = 0;
  /// Higher goes first; among equals the one that was added first.
  float priority = 0.5F;
  std::int32_t prompt_length = 0;
  /// Tokens to generate at most, at least one.
  std::int32_t max_tokens = 0;
  /// nullptr: the base model.
  std::shared_ptr<const HostAdapter> adapter;
  /// The position from which on the adapter acts.
  std::int32_t adapter_from = 0;
  std::optional<std::uint64_t> cache_salt;
  /// Of what the prompt has besides token ids; nullptr: nothing. Sequences of one request share it.
  std::shared_ptr<const PrefixDigests> given;
  /// nullptr: the default for all of its blocks.
  std::shared_ptr<const KvCacheRetentionConfig> retention;
  /// Compute every prompt token, even where its KV could be reused: the request wants their logits.
  bool compute_whole_prompt = false;
  /// Sequences that will be forked from this one when its prompt is computed; from its start on there is room
  /// for them. Scheduler::fork() and end_forks() take them off.
  std::int32_t num_forks = 0;
  /// One of the beams of its request's search, or the prompt that they begin with. They go on together: the
  /// KV blocks that they may come to need are kept for them, and none is ever paused. Once its tokens are
  /// computed a beam waits for Scheduler::move_beams() and its next token.
  bool is_beam = false;

  /// nullptr: the engine has no encoder. Sequences of one request share it.
  EncoderTokens encoder_tokens;
  /// Run the encoder at the first start, even where its keys and values could be reused: the request wants
  /// its output.
  bool compute_encoder_input = false;

  /// The prompt, then what was generated. The executor appends a token after each step that sampled one, and
  /// removes the sequence from the scheduler when that was the last.
  std::vector<std::int32_t> tokens;
  /// Guesses of the tokens after these, which are none of them before they were generated. The executor makes
  /// them after each step that sampled a token.
  std::vector<std::int32_t> drafts;

  // The scheduler's, from here on.
  SequenceState state = SequenceState::kNew;
  std::uint64_t arrival = 0;
  /// Among sequences of one priority that run, the one with the highest is paused first.
  std::uint64_t place = 0;
  /// Tokens at the front that count as computed for its adapter.
  std::int32_t num_charged = 0;
  /// Waiting although it ran before.
  bool paused = false;
  std::int32_t times_paused = 0;
  /// Tokens at the front whose KV is in `table`'s blocks.
  std::int32_t num_computed = 0;
  BlockTable table;
  /// Of the keys and values that the encoder makes of encoder_tokens, in the step in which the sequence
  /// starts or before. Shared by all that have the same.
  CrossBlockPool::Share cross;
  CrossCounts cross_counts;
  /// Shared by the sequences that were forked from one another.
  std::shared_ptr<const DeviceLease> lease;
  /// Sequences with adapters that started ahead of this one while its adapter got no pages.
  std::int32_t times_passed_over = 0;

  /// 0: the engine has no encoder.
  [[nodiscard]] std::int32_t encoder_length() const {
    return encoder_tokens ? static_cast<std::int32_t>(encoder_tokens->size()) : 0;
  }
  [[nodiscard]] std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  [[nodiscard]] std::int32_t num_generated() const { return num_tokens() - prompt_length; }
  [[nodiscard]] std::int32_t num_to_compute() const { return num_tokens() - num_computed; }
  /// Only the newest generated token is left to compute.
  [[nodiscard]] bool is_decoding() const { return num_generated() > 0 && num_to_compute() == 1; }
  /// Tokens whose KV it can come to need: the last one generated is never fed back.
  [[nodiscard]] std::int64_t max_kv_tokens() const { return std::int64_t{prompt_length} + max_tokens - 1; }
  [[nodiscard]] ReuseKey reuse_key() const {
    if (!adapter) return {.cache_salt = cache_salt, .given = given.get()};
    return {.adapter_generation = adapter->generation(),
            .cache_salt = cache_salt,
            .task_id = adapter->task_id(),
            .adapter_digest = adapter->known_content_digest(),
            .adapter_from = adapter_from,
            .given = given.get()};
  }
  /// For StepInput::adapters; nullptr: the base model.
  [[nodiscard]] const DeviceAdapter* device_adapter() const { return lease ? &lease->adapter() : nullptr; }
};

}  // namespace adaptrt
