#include "adaptrt/kv/sequence_memory.h"

#include <algorithm>

namespace adaptrt {

SequenceMemoryPool::SequenceMemoryPool(const SequenceMemoryOptions& options)
    : block_pool_(options.num_blocks, options.tokens_per_block, options.enable_block_reuse, options.events,
                  options.partial_reuse, options.second_level) {
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
  std::int32_t num_tokens = block_pool_.reuse_prefix(memory.table, content.key, content.tokens);
  num_tokens += block_pool_.onboard(memory.table, content.key, content.tokens, is_still_read);
  num_tokens += block_pool_.reuse_beginning(memory.table, content.key, content.tokens, copy);
  memory.num_computed = num_tokens;
  retain_blocks(memory, content, 0);
  return copy;
}

void SequenceMemoryPool::share(SequenceMemory& memory, const SequenceContent& content) {
  const std::int32_t num_shared = memory.table.num_indexed;
  block_pool_.index_full_blocks(memory.table, content.key, content.tokens, memory.num_computed);
  retain_blocks(memory, content, num_shared);
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
  if (!block_pool_.try_fork(parent.table, parent.num_computed, child.table, copy)) return false;
  child.num_computed = parent.num_computed;
  child.cross = parent.cross;
  return true;
}

void SequenceMemoryPool::release(SequenceMemory& memory) {
  block_pool_.release(memory.table);
  memory.cross.reset();
  memory.num_computed = 0;
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
