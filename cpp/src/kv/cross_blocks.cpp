#include "adaptrt/kv/cross_blocks.h"

#include <numeric>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {

CrossBlocks::~CrossBlocks() {
  pool_.give_back(blocks_);
}

CrossBlockPool::CrossBlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block)
    : num_blocks_(num_blocks), tokens_per_block_(tokens_per_block) {
  if (num_blocks < 1 || tokens_per_block < 1) {
    throw ConfigError("a pool of encoder inputs needs blocks and tokens, not " + std::to_string(num_blocks) +
                      " blocks of " + std::to_string(tokens_per_block));
  }
  free_.resize(static_cast<std::size_t>(num_blocks));
  std::iota(free_.begin(), free_.end(), 0);
}

std::shared_ptr<const CrossBlocks> CrossBlockPool::try_take(std::int32_t num_tokens) {
  const auto wanted = static_cast<std::ptrdiff_t>(blocks_for(num_tokens));
  if (wanted > static_cast<std::ptrdiff_t>(free_.size())) return nullptr;
  std::vector<BlockId> blocks(free_.end() - wanted, free_.end());
  auto taken = std::make_shared<const CrossBlocks>(*this, std::move(blocks));
  free_.erase(free_.end() - wanted, free_.end());
  return taken;
}

void CrossBlockPool::give_back(const std::vector<BlockId>& blocks) {
  free_.insert(free_.end(), blocks.begin(), blocks.end());  // where they were before: there is room
}

}  // namespace adaptrt
