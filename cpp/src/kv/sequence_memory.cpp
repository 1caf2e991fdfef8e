#include "adaptrt/kv/sequence_memory.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace adaptrt {

namespace {

/// The end of a snapshot that is not wanted.
constexpr std::int32_t kNoSnapshot = std::numeric_limits<std::int32_t>::max();

std::optional<StatePool> make_state_pool(const SequenceMemoryOptions& options) {
  if (options.num_state_slots == 0) return std::nullopt;
  const std::int32_t num_snapshots = options.enable_block_reuse ? options.num_state_snapshots : 0;
  return std::optional<StatePool>(std::in_place, options.num_state_slots, num_snapshots, options.num_blocks);
}

}  // namespace

SequenceMemoryPool::SequenceMemoryPool(const SequenceMemoryOptions& options)
    : state_pool_(make_state_pool(options)),
      block_pool_(options.num_blocks, options.tokens_per_block, options.enable_block_reuse, options.events,
                  options.partial_reuse, options.second_level, has_states() ? &*state_pool_ : nullptr) {
  if (options.num_cross_blocks != 0) {
    cross_pool_.emplace(options.num_cross_blocks, options.tokens_per_block, options.enable_block_reuse);
  }
}

std::int64_t SequenceMemoryPool::blocks_for_forks(std::int64_t num_tokens, std::int64_t num_shared_tokens,
                                                  std::int32_t num_forks) const {
  const std::int64_t of_one = blocks_for(num_tokens);
  const std::int64_t shared = num_shared_tokens / tokens_per_block();
  return of_one + num_forks * (of_one - shared);
}

std::int64_t SequenceMemoryPool::blocks_to_grow(const SequenceMemory& memory, std::int64_t num_tokens) const {
  return std::max(blocks_for(num_tokens) - memory.num_blocks(), std::int64_t{0});
}

std::int64_t SequenceMemoryPool::room_after(const SequenceMemory& memory, std::int64_t num_reserved) const {
  const std::int64_t blocks = memory.num_blocks() + num_available() - num_reserved;
  return blocks * tokens_per_block() - memory.num_computed;
}

void SequenceMemoryPool::reserve(SequenceMemory& memory, std::int64_t num_tokens) const {
  memory.table.blocks.reserve(static_cast<std::size_t>(blocks_for(num_tokens)));
}

ReusablePrefix SequenceMemoryPool::find_prefix(const SequenceContent& content) const {
  const BlockPool::PrefixMatch match = block_pool_.match_prefix(content.key, content.tokens);
  return {.num_tokens = match.num_blocks * tokens_per_block() + match.num_partial_tokens,
          .num_blocks = match.num_blocks,
          .num_unused_blocks = match.num_unused_blocks};
}

BlockCopy SequenceMemoryPool::reuse_prefix(SequenceMemory& memory, const SequenceContent& content,
                                           const std::function<bool(BlockId)>& is_still_read) {
  BlockCopy copy;
  if (has_states()) {
    memory.states.num_shared_tokens =
        block_pool_.match_prefix(content.key, content.tokens).num_blocks_with_kv * tokens_per_block();
  }
  std::int32_t num_tokens = block_pool_.reuse_prefix(memory.table, content.key, content.tokens);
  if (has_states() && num_tokens > 0) reuse_states(memory);
  const std::int32_t num_onboarded =
      block_pool_.onboard(memory.table, content.key, content.tokens, is_still_read);
  if (has_states() && num_onboarded > 0) reuse_states(memory);
  num_tokens += num_onboarded;
  num_tokens += block_pool_.reuse_beginning(memory.table, content.key, content.tokens, copy);
  memory.num_computed = num_tokens;
  retain_blocks(memory, content, 0);
  return copy;
}

void SequenceMemoryPool::share(SequenceMemory& memory, const SequenceContent& content) {
  const std::int32_t num_shared = memory.table.num_indexed;
  block_pool_.index_full_blocks(memory.table, content.key, content.tokens, memory.num_computed);
  retain_blocks(memory, content, num_shared);
  if (has_states()) take_snapshot(memory, content);
}

bool SequenceMemoryPool::try_grow(SequenceMemory& memory, std::int32_t num_tokens) {
  const bool needs_slot = has_states() && memory.states.slot == kNoStateSlot;
  if (needs_slot && !state_pool_->has_free()) return false;
  if (!block_pool_.try_grow(memory.table, num_tokens)) return false;
  if (needs_slot) memory.states.slot = state_pool_->take();
  return true;
}

bool SequenceMemoryPool::try_save_states(SequenceMemory& memory) {
  if (!has_states() || memory.states.saved != kNoStateSlot) return true;
  memory.states.saved = state_pool_->save(memory.states.slot);
  return memory.states.saved != kNoStateSlot;
}

void SequenceMemoryPool::keep(SequenceMemory& memory, std::int32_t num_tokens, std::int32_t num_wrong) {
  const StateSlot saved = std::exchange(memory.states.saved, kNoStateSlot);
  if (num_wrong > 0 && has_states()) {
    if (saved == kNoStateSlot) throw std::logic_error("wrong drafts have changed states that were not saved");
    state_pool_->restore(saved, memory.states.slot, memory);
    return;
  }
  if (saved != kNoStateSlot) state_pool_->drop_saved(saved);
  memory.num_computed = num_tokens;
}

void SequenceMemoryPool::reuse_states(SequenceMemory& memory) {
  if (memory.states.slot == kNoStateSlot) memory.states.slot = state_pool_->take();
  state_pool_->reuse_snapshot(memory.blocks().back(), memory.states.slot, memory);
}

std::int32_t SequenceMemoryPool::next_snapshot(const HeldStates& states, const SequenceContent& content,
                                               std::int32_t after) const {
  std::int32_t next = kNoSnapshot;
  for (const std::int32_t length :
       {content.prompt_length - 1, states.num_shared_tokens, content.key.adapter_from}) {
    const std::int32_t end =
        std::min(length, content.prompt_length - 1) / tokens_per_block() * tokens_per_block();
    if (end > after) next = std::min(next, end);
  }
  return next;
}

std::int32_t SequenceMemoryPool::tokens_to_snapshot(const SequenceMemory& memory,
                                                    const SequenceContent& content) const {
  if (!has_states() || state_pool_->num_snapshots() == 0) return kNoSnapshot;
  const std::int32_t next = next_snapshot(memory.states, content, memory.num_computed);
  return next == kNoSnapshot ? next : next - memory.num_computed;
}

void SequenceMemoryPool::take_snapshot(SequenceMemory& memory, const SequenceContent& content) {
  const std::int32_t num_blocks = memory.table.num_indexed;
  if (num_blocks == 0 || num_blocks * tokens_per_block() != memory.num_computed) return;
  const bool is_generated = memory.num_computed >= content.prompt_length;
  if (is_generated && !content.continues_later) return;
  if (!is_generated &&
      next_snapshot(memory.states, content, memory.num_computed - 1) != memory.num_computed) {
    return;
  }
  const BlockId block = memory.blocks()[static_cast<std::size_t>(num_blocks - 1)];
  if (!block_pool_.is_indexed(block)) return;  // reset_reuse() came after it was shared
  std::int32_t& newest = memory.states.generated_snapshot;
  // Only the newest one of a sequence is useful: its continuation begins with all of its tokens.
  if (is_generated && newest >= 0 && state_pool_->snapshot_after(block) == kNoStateSlot) {
    state_pool_->drop_snapshot(memory.blocks()[static_cast<std::size_t>(std::exchange(newest, -1))]);
  }
  const bool was_taken = state_pool_->take_snapshot(block, memory.states.slot);
  if (is_generated && was_taken) newest = num_blocks - 1;
}

void SequenceMemoryPool::retain_blocks(const SequenceMemory& memory, const SequenceContent& content,
                                       std::int32_t first) {
  if (content.retention == nullptr) return;
  for (std::int32_t i = first; i < memory.table.num_indexed; ++i) {
    const auto retention = content.retention->for_block(i * tokens_per_block(), content.prompt_length);
    if (retention) block_pool_.set_retention(memory.table, i, *retention);
  }
}

bool SequenceMemoryPool::try_fork(const SequenceMemory& parent, SequenceMemory& child, BlockCopy& copy) {
  if (has_states() && !state_pool_->has_free()) return false;
  if (!block_pool_.try_fork(parent.table, parent.num_computed, child.table, copy)) return false;
  if (has_states()) {
    child.states.slot = state_pool_->take();
    state_pool_->copy(parent.states.slot, child.states.slot, child);
  }
  child.num_computed = parent.num_computed;
  child.cross = parent.cross;
  return true;
}

void SequenceMemoryPool::release(SequenceMemory& memory) {
  block_pool_.release(memory.table);
  if (memory.states.saved != kNoStateSlot) state_pool_->drop_saved(memory.states.saved);
  if (memory.states.slot != kNoStateSlot) state_pool_->give_back(memory.states.slot);
  memory.states = {};
  memory.cross.reset();
  memory.num_computed = 0;
}

void SequenceMemoryPool::reset_reuse() {
  block_pool_.reset_reuse();
  if (has_encoder()) cross_pool_->reset_reuse();
}

bool SequenceMemoryPool::reuse_encoder_input(SequenceMemory& memory, const ReuseKey& key,
                                             const EncoderTokens& tokens) {
  memory.cross = cross_pool_->reuse(key, tokens, memory.cross_counts);
  return memory.cross != nullptr;
}

void SequenceMemoryPool::take_encoder_input(SequenceMemory& memory, const ReuseKey& key,
                                            const EncoderTokens& tokens) {
  memory.cross = cross_pool_->try_take(key, tokens, memory.cross_counts);
}

}  // namespace adaptrt
