#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/engine/program.h"

namespace adaptrt {

/// The keys and values of all layers in blocks of tokens_per_block tokens.
///
/// A block holds, for each layer and key-value head, its keys as [head_dim][tokens] (the panel order of a
/// matrix [tokens, head_dim], so that scores are sums over contiguous tokens) and its values as
/// [tokens][head_dim]:
///
///   block: [layer][keys, values][key-value head][head_dim * tokens_per_block]
class KvPool {
 public:
  explicit KvPool(const Program& program)
      : dtype_(program.dtype),
        heads_(program.shape.num_key_value_heads),
        head_dim_(program.shape.head_dim),
        tokens_per_block_(program.tokens_per_block),
        head_bytes_(static_cast<std::size_t>(head_dim_ * tokens_per_block_) * size_of(dtype_)),
        block_bytes_(static_cast<std::size_t>(program.num_layers) * 2 * static_cast<std::size_t>(heads_) *
                     head_bytes_) {}

  /// Throws ConfigError when the memory is refused or this was called before.
  void allocate(std::int32_t num_blocks);

  [[nodiscard]] std::int32_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] std::size_t block_bytes() const { return block_bytes_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t tokens_per_block() const { return tokens_per_block_; }

  /// [head_dim][tokens_per_block]
  [[nodiscard]] std::byte* keys(std::int32_t block, std::int64_t layer, std::int64_t head) const {
    return head_of(block, layer * 2 * heads_ + head);
  }
  /// [tokens_per_block][head_dim]
  [[nodiscard]] std::byte* values(std::int32_t block, std::int64_t layer, std::int64_t head) const {
    return head_of(block, (layer * 2 + 1) * heads_ + head);
  }

 private:
  [[nodiscard]] std::byte* head_of(std::int32_t block, std::int64_t index) const {
    return memory_.data() + static_cast<std::size_t>(block) * block_bytes_ +
           static_cast<std::size_t>(index) * head_bytes_;
  }

  DType dtype_;
  std::int64_t heads_;
  std::int64_t head_dim_;
  std::int64_t tokens_per_block_;
  std::size_t head_bytes_;
  std::size_t block_bytes_;
  std::int32_t num_blocks_ = 0;
  HugeArray memory_;
};

}  // namespace adaptrt
