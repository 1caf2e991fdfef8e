#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "adaptrt/kv/second_level.h"

namespace adaptrt {

class CrossBlockPool;

/// The blocks of one encoder input's keys and values. They go back to the pool, which outlives them, when
/// nobody has them any more.
class CrossBlocks {
 public:
  CrossBlocks(CrossBlockPool& pool, std::vector<BlockId> blocks) : pool_(pool), blocks_(std::move(blocks)) {}
  ~CrossBlocks();
  CrossBlocks(const CrossBlocks&) = delete;
  CrossBlocks& operator=(const CrossBlocks&) = delete;

  [[nodiscard]] const std::vector<BlockId>& blocks() const { return blocks_; }

 private:
  CrossBlockPool& pool_;
  std::vector<BlockId> blocks_;
};

/// Bookkeeping of the blocks that encoder inputs have for the keys and values that decoders see. They are
/// written once, in the step in which a sequence starts, and shared by the sequences that are forked from it.
/// The memory belongs to the engine.
class CrossBlockPool {
 public:
  /// Throws ConfigError unless both numbers are positive.
  CrossBlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block);
  CrossBlockPool(const CrossBlockPool&) = delete;
  CrossBlockPool& operator=(const CrossBlockPool&) = delete;

  /// Blocks for so many tokens; nullptr when there are not enough.
  [[nodiscard]] std::shared_ptr<const CrossBlocks> try_take(std::int32_t num_tokens);

  [[nodiscard]] std::int32_t blocks_for(std::int64_t num_tokens) const {
    return static_cast<std::int32_t>((num_tokens + tokens_per_block_ - 1) / tokens_per_block_);
  }
  [[nodiscard]] std::int32_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] std::int32_t tokens_per_block() const { return tokens_per_block_; }
  [[nodiscard]] std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }

 private:
  friend class CrossBlocks;
  void give_back(const std::vector<BlockId>& blocks);

  std::int32_t num_blocks_;
  std::int32_t tokens_per_block_;
  std::vector<BlockId> free_;
};

}  // namespace adaptrt
