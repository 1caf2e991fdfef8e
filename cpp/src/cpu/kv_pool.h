#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/thread_pool.h"
#include "adaptrt/cpu/attention_tile.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// Layout of one layer in a block: [key-value head][keys, values][elements, then the scales of int8]. If
/// values are keys (AttentionShape), there are no values.
struct KvLayer {
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::size_t offset = 0;        ///< in a block
  std::size_t key_bytes = 0;     ///< of a head's elements
  std::size_t value_bytes = 0;   ///< of a head's elements
  std::size_t value_offset = 0;  ///< from a head's keys to its values
  std::size_t head_bytes = 0;
  std::size_t token_bytes = 0;  ///< of a token's keys and values, scales included
};

/// Keys or values of one block, layer and key-value head.
struct KvPart {
  std::byte* elements = nullptr;  ///< in the layout of adaptrt/cpu/attention_tile.h
  float* scales = nullptr;        ///< int8: [slots]
};

/// The keys and values of all layers in blocks of tokens_per_block tokens.
///
/// A block has tokens_per_block slots, rounded up to whole groups. Keys and values have the layout of
/// adaptrt/cpu/attention_tile.h:
///
///   block: [layer][key-value head][keys, values][elements, then the scales of int8]
///
/// Layers may have different heads. All data in the pool except keys is always finite, because attention
/// multiplies the values of masked keys by zero.
class KvPool {
 public:
  /// `dtype`: type of the elements, or the engine's type if the elements are int8. A layer without heads has
  /// no bytes.
  KvPool(DType dtype, bool is_int8, std::int64_t tokens_per_block, const std::vector<AttentionShape>& layers);

  /// Throws ConfigError if the system refuses the memory or if this was called before.
  void allocate(std::int32_t num_blocks);

  /// Copies blocks from[i] to to[i], in order.
  void copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to, ThreadPool& threads);

  /// The bytes of a block. Throws EngineError if there is no such block.
  [[nodiscard]] std::span<std::byte> block(std::int32_t block) const;

  [[nodiscard]] std::int32_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] std::size_t block_bytes() const { return block_bytes_; }
  [[nodiscard]] const KvLayer& layer(std::int32_t layer) const {
    return layers_[static_cast<std::size_t>(layer)];
  }
  /// A layer with these key-value heads. There must be one.
  [[nodiscard]] const KvLayer& layer_like(const AttentionShape& shape) const;
  /// Type of the elements, or the engine's type if the elements are int8.
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] bool is_int8() const { return is_int8_; }
  [[nodiscard]] std::int64_t tokens_per_block() const { return tokens_per_block_; }
  [[nodiscard]] std::int64_t slots() const { return slots_; }
  /// Bytes of an element.
  [[nodiscard]] std::size_t element_bytes() const { return is_int8_ ? 1 : size_of(dtype_); }
  /// Number of consecutive k that a panel interleaves.
  [[nodiscard]] std::int64_t interleave() const { return is_int8_ ? 2 : k_interleave(dtype_); }

  [[nodiscard]] KvPart keys(std::int32_t block, const KvLayer& layer, std::int64_t head) const {
    return part(block, layer, head, 0, layer.key_bytes);
  }
  [[nodiscard]] KvPart values(std::int32_t block, const KvLayer& layer, std::int64_t head) const {
    return part(block, layer, head, layer.value_offset, layer.value_bytes);
  }

 private:
  [[nodiscard]] std::size_t scale_bytes(std::int64_t slots) const {
    return is_int8_ ? static_cast<std::size_t>(slots) * sizeof(float) : 0;
  }
  [[nodiscard]] KvLayer layer_of(const AttentionShape& shape) const;
  [[nodiscard]] KvPart part(std::int32_t block, const KvLayer& layer, std::int64_t head, std::size_t offset,
                            std::size_t bytes) const {
    std::byte* elements = memory_.data() + static_cast<std::size_t>(block) * block_bytes_ + layer.offset +
                          static_cast<std::size_t>(head) * layer.head_bytes + offset;
    return {elements, is_int8_ ? reinterpret_cast<float*>(elements + bytes) : nullptr};
  }

  DType dtype_;
  bool is_int8_;
  std::int64_t tokens_per_block_;
  std::int64_t slots_;
  std::vector<KvLayer> layers_;
  std::size_t block_bytes_ = 0;
  std::int32_t num_blocks_ = 0;
  HugeArray memory_;
};

/// Layout of a program's KV blocks.
[[nodiscard]] KvPool make_kv_pool(const Program& program);
/// Layout of the blocks of encoder inputs, with the decoder's layers.
[[nodiscard]] KvPool make_cross_pool(const Program& program);
/// Layout for attention that needs keys and values only during the op: one layer for each shape of heads. No
/// layers if the program has no such attention.
[[nodiscard]] KvPool make_own_keys(const Program& program);

}  // namespace adaptrt
