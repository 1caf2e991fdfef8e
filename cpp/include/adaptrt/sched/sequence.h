#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "adaptrt/kv/retention.h"
#include "adaptrt/kv/reuse_key.h"
#include "adaptrt/kv/sequence_memory.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

enum class SequenceState : std::uint8_t {
  kNew,       ///< not given to a scheduler yet
  kWaiting,   ///< holds no memory and no lease; `preempted` says if it ran before
  kRunning,   ///< holds memory and, with an adapter, a lease
  kFinished,  ///< removed from the scheduler
};

/// Tokens [begin, end) of a prompt that attend to each other in both directions.
struct JointTokens {
  std::int32_t begin = 0;
  std::int32_t end = 0;

  bool operator==(const JointTokens&) const = default;
};

/// The scheduler's view of one sequence of a request. The executor owns it, and its address must not change
/// while a scheduler knows it.
struct Sequence {
  Sequence() = default;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Set before Scheduler::add() and constant afterwards.
  std::uint64_t id = 0;
  /// Index among the sequences of its request.
  std::int32_t index = 0;
  /// Higher goes first; among equals the sequence that was added first.
  float priority = 0.5F;
  std::int32_t prompt_length = 0;
  /// Maximum number of tokens to generate, at least 1.
  std::int32_t max_tokens = 0;
  /// nullptr for the base model.
  std::shared_ptr<const HostAdapter> adapter;
  /// Position of the first token that the adapter acts on.
  std::int32_t adapter_from = 0;
  std::optional<std::uint64_t> cache_salt;
  /// Digests of prompt content that is not token ids; nullptr if none. Sequences of one request share them.
  std::shared_ptr<const PrefixDigests> given;
  /// Ascending; a step that computes one of these tokens computes all of them up to `end`. nullptr if there
  /// are none. Sequences of one request share them.
  std::shared_ptr<const std::vector<JointTokens>> joint;
  /// nullptr for the default retention of all its blocks.
  std::shared_ptr<const KvCacheRetentionConfig> retention;
  /// True if every prompt token must be computed, even if its KV could be reused: the request wants their
  /// logits.
  bool compute_whole_prompt = false;
  /// Number of sequences that will be forked from this one when its prompt is computed. Room is reserved for
  /// them from its start. Scheduler::fork() and end_forks() reduce it.
  std::int32_t num_forks = 0;
  /// True for a beam of its request's search and for the prompt that the beams start from. Beams advance
  /// together: the KV blocks that they may need are reserved, and none is ever preempted. After its tokens
  /// are computed, a beam waits for Scheduler::move_beams() and its next token.
  bool is_beam = false;

  /// nullptr if the engine has no encoder. Sequences of one request share it.
  EncoderTokens encoder_tokens;
  /// True if the encoder must run at the first start, even if its keys and values could be reused: the
  /// request wants its output.
  bool compute_encoder_input = false;

  /// The prompt, then the generated tokens. The executor appends a token after each step that sampled one.
  /// After the last token it removes the sequence from the scheduler.
  std::vector<std::int32_t> tokens;
  /// Guesses of the next tokens, none of which is generated yet. The executor makes them after each step that
  /// sampled a token.
  std::vector<std::int32_t> drafts;

  // The scheduler owns the following fields.
  SequenceState state = SequenceState::kNew;
  std::uint64_t arrival = 0;
  /// Among running sequences of one priority, the one with the highest place is preempted first.
  std::uint64_t place = 0;
  /// Number of tokens at the front that are charged to the adapter.
  std::int32_t num_charged = 0;
  /// True if the sequence waits although it ran before.
  bool preempted = false;
  std::int32_t times_preempted = 0;
  /// Memory of the sequence between steps. An encoder input is computed in the step in which the sequence
  /// starts, or earlier.
  SequenceMemory memory;
  /// Sequences that were forked from one another share it.
  std::shared_ptr<const DeviceLease> lease;
  /// Number of sequences with adapters that started ahead of this one while its adapter got no pages.
  std::int32_t times_skipped = 0;

  /// Returns 0 if the engine has no encoder.
  [[nodiscard]] std::int32_t encoder_length() const {
    return encoder_tokens ? static_cast<std::int32_t>(encoder_tokens->size()) : 0;
  }
  [[nodiscard]] std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  [[nodiscard]] std::int32_t num_generated() const { return num_tokens() - prompt_length; }
  /// Number of tokens at the front that are computed.
  [[nodiscard]] std::int32_t num_computed() const { return memory.num_computed; }
  [[nodiscard]] std::int32_t num_to_compute() const { return num_tokens() - num_computed(); }
  /// True if only the newest generated token is left to compute.
  [[nodiscard]] bool is_decoding() const { return num_generated() > 0 && num_to_compute() == 1; }
  /// Maximum value of num_computed(): the last generated token is never computed.
  [[nodiscard]] std::int64_t max_computed_tokens() const {
    return std::int64_t{prompt_length} + max_tokens - 1;
  }
  [[nodiscard]] ReuseKey reuse_key() const {
    if (!adapter) return {.cache_salt = cache_salt, .given = given.get()};
    return {.adapter_generation = adapter->generation(),
            .cache_salt = cache_salt,
            .task_id = adapter->task_id(),
            .adapter_digest = adapter->known_content_digest(),
            .adapter_from = adapter_from,
            .given = given.get()};
  }
  [[nodiscard]] SequenceContent content() const {
    return {.key = reuse_key(),
            .tokens = tokens,
            .prompt_length = prompt_length,
            .retention = retention.get(),
            .continues_later = !is_beam};
  }
  /// Returns the value for StepInput::adapters; nullptr for the base model.
  [[nodiscard]] const DeviceAdapter* device_adapter() const { return lease ? &lease->adapter() : nullptr; }
};

}  // namespace adaptrt
