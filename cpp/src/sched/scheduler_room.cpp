// Room that sequences need, and promises of it.

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

std::optional<std::string> Scheduler::check_capacity(std::int64_t prompt_length, std::int64_t max_tokens,
                                                     std::int32_t num_sequences, bool are_beams,
                                                     std::int64_t encoder_length) const {
  constexpr std::int64_t kLongest = std::numeric_limits<std::int32_t>::max();
  if (prompt_length < 1 || max_tokens < 1 || prompt_length > kLongest ||
      max_tokens > kLongest - prompt_length) {
    return "a prompt of " + std::to_string(prompt_length) +
           " tokens with max_tokens = " + std::to_string(max_tokens) +
           "; each must be at least 1 and their sum at most " + std::to_string(kLongest);
  }
  if (prompt_length > limits_.max_num_tokens &&
      (computes_sequences_whole() || !limits_.enable_chunked_context)) {
    return "the prompt has " + std::to_string(prompt_length) +
           " tokens, a step takes max_num_tokens = " + std::to_string(limits_.max_num_tokens) +
           (computes_sequences_whole() ? " and the engine computes prompts whole"
                                       : " and enable_chunked_context is off");
  }
  if (encoder_length > limits_.max_num_tokens) {
    return "the encoder input has " + std::to_string(encoder_length) +
           " tokens, a step takes max_num_tokens = " + std::to_string(limits_.max_num_tokens) +
           " and an encoder input is computed whole";
  }
  const CrossBlockPool* const cross = memory_.cross_pool();
  if (cross != nullptr && cross->blocks_for(encoder_length) > cross->num_blocks()) {
    return "an encoder input of " + std::to_string(encoder_length) + " tokens needs " +
           std::to_string(cross->blocks_for(encoder_length)) + " blocks of " +
           std::to_string(cross->tokens_per_block()) + " tokens; there are " +
           std::to_string(cross->num_blocks()) + " for encoder inputs (cross_kv_cache_fraction)";
  }
  if (num_sequences < 1 || num_sequences > limits_.max_batch_size) {
    return "a request of " + std::to_string(num_sequences) +
           " sequences; accepted: 1 to max_batch_size = " + std::to_string(limits_.max_batch_size) +
           ", because they run at once";
  }
  // If sequences may be preempted, each can progress without the others, except beams. Sequences that end
  // with their first token are never forked.
  const std::int32_t num_forks = (may_preempt() && !are_beams) || max_tokens == 1 ? 0 : num_sequences - 1;
  const std::int64_t needed = blocks_with_forks(prompt_length, max_tokens, num_forks);
  if (needed > memory_.num_blocks()) {
    const std::string what = are_beams ? " beams" : " sequences";
    const std::string sequences = num_forks == 0 ? "" : " and " + std::to_string(num_sequences) + what;
    return "a prompt of " + std::to_string(prompt_length) +
           " tokens with max_tokens = " + std::to_string(max_tokens) + sequences + " needs " +
           std::to_string(needed) + " KV blocks of " + std::to_string(memory_.tokens_per_block()) +
           " tokens; there are " + std::to_string(memory_.num_blocks());
  }
  return std::nullopt;
}

std::int64_t Scheduler::num_promised_blocks() const {
  std::int64_t promised = 0;
  for (const Sequence* sequence : running_) {
    // Drafts may have given it more blocks than it wants.
    promised += std::max(blocks_wanted(*sequence) - sequence->memory.num_blocks(), std::int64_t{0});
  }
  return promised;
}

std::int64_t Scheduler::blocks_wanted(const Sequence& sequence) const {
  if (may_preempt() && !sequence.is_beam) return memory_.blocks_for(sequence.num_tokens());
  return blocks_with_forks(sequence.prompt_length, sequence.max_tokens, sequence.num_forks);
}

std::int64_t Scheduler::blocks_with_forks(std::int64_t prompt_length, std::int64_t max_tokens,
                                          std::int32_t num_forks) const {
  return memory_.blocks_for_forks(prompt_length + max_tokens - 1, prompt_length, num_forks);
}

std::int32_t Scheduler::room_for(const Sequence& sequence) const {
  const std::int64_t room = memory_.room_after(sequence.memory, sequence.is_beam ? 0 : num_reserved_);
  return static_cast<std::int32_t>(std::min<std::int64_t>(room, std::numeric_limits<std::int32_t>::max()));
}

bool Scheduler::has_encoder_room(const Sequence& sequence, const StepPlan& plan) const {
  if (!sequence.encoder_tokens) return true;
  if (may_reuse_encoder_input(sequence) &&
      memory_.can_reuse_encoder_input(sequence.reuse_key(), sequence.encoder_tokens)) {
    return true;
  }
  const std::int32_t length = sequence.encoder_length();
  return plan.num_encoder_tokens + length <= limits_.max_num_tokens && memory_.has_encoder_room(length);
}

std::int32_t Scheduler::num_promised_forks() const {
  std::int32_t promised = 0;
  for (const Sequence* sequence : running_) promised += sequence->num_forks;
  return promised;
}

}  // namespace adaptrt
