#include "kv_pool.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <variant>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "op_members.h"

namespace adaptrt {

KvPool::KvPool(DType dtype, bool is_int8, std::int64_t tokens_per_block,
               const std::vector<AttentionShape>& layers)
    : dtype_(dtype),
      is_int8_(is_int8),
      tokens_per_block_(tokens_per_block),
      slots_(whole_groups(tokens_per_block_)) {
  for (const AttentionShape& shape : layers) {
    layers_.push_back(layer_of(shape));
    layers_.back().offset = block_bytes_;
    block_bytes_ += static_cast<std::size_t>(layers_.back().heads) * layers_.back().head_bytes;
  }
}

const KvLayer& KvPool::layer_like(const AttentionShape& shape) const {
  return *std::ranges::find_if(layers_, [&](const KvLayer& layer) {
    return layer.heads == shape.num_key_value_heads && layer.head_dim == shape.head_dim;
  });
}

KvLayer KvPool::layer_of(const AttentionShape& shape) const {
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  KvLayer layer{.heads = shape.num_key_value_heads, .head_dim = shape.head_dim};
  layer.key_bytes = head_dim * static_cast<std::size_t>(slots_) * element_bytes();
  if (shape.values_are_keys) {
    layer.head_bytes = layer.key_bytes;
    layer.token_bytes = head_dim * element_bytes();
    return layer;
  }
  layer.value_bytes = static_cast<std::size_t>(whole_groups(shape.head_dim) * slots_) * element_bytes();
  layer.value_offset = layer.key_bytes + scale_bytes(slots_);
  layer.head_bytes = layer.value_offset + layer.value_bytes + scale_bytes(slots_);
  layer.token_bytes =
      static_cast<std::size_t>(2 * layer.heads) * (head_dim * element_bytes() + scale_bytes(1));
  return layer;
}

void KvPool::allocate(std::int32_t num_blocks) {
  if (num_blocks_ != 0) throw ConfigError("the KV pool was allocated before");
  if (num_blocks < 1)
    throw ConfigError("the KV pool needs at least one block, not " + std::to_string(num_blocks));
  std::size_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(block_bytes_, static_cast<std::size_t>(num_blocks), &bytes);
  try {
    if (overflow) throw std::bad_alloc();
    memory_ = HugeArray(bytes);
  } catch (const std::bad_alloc&) {
    throw ConfigError("no memory for a KV pool of " + std::to_string(num_blocks) + " blocks of " +
                      std::to_string(block_bytes_) + " bytes");
  }
  num_blocks_ = num_blocks;
}

std::span<std::byte> KvPool::block(std::int32_t block) const {
  if (block < 0 || block >= num_blocks_) {
    throw EngineError("there is no KV block " + std::to_string(block) + " among " +
                      std::to_string(num_blocks_));
  }
  return {memory_.data() + static_cast<std::size_t>(block) * block_bytes_, block_bytes_};
}

KvPool make_kv_pool(const Program& program) {
  std::vector<AttentionShape> layers(static_cast<std::size_t>(program.num_layers));
  for (const Op& op : program.body) {
    const auto* attention = std::get_if<AttentionOp>(&op);
    if (attention == nullptr || attention->kind != AttentionKind::kCausal) continue;
    if (attention->shared_layer >= 0) continue;
    layers[static_cast<std::size_t>(attention->layer)] = attention->shape;
  }
  return {program.dtype, program.int8_kv_cache, program.tokens_per_block, layers};
}

std::size_t kv_block_bytes(const Program& program) {
  return make_kv_pool(program).block_bytes();
}

KvPool make_cross_pool(const Program& program) {
  std::vector<AttentionShape> layers(static_cast<std::size_t>(program.num_layers));
  for (const Op& op : program.encoder) {
    const auto* keys = std::get_if<CrossKeysOp>(&op);
    if (keys != nullptr) layers[static_cast<std::size_t>(keys->layer)] = keys->shape;
  }
  return {program.dtype, program.int8_kv_cache, program.tokens_per_block, layers};
}

KvPool make_own_keys(const Program& program) {
  // Only queries of the same op read these keys, so they have the engine's type and whole tiles.
  std::vector<AttentionShape> shapes;
  for_each_member<AttentionOp>(program, [&](const AttentionOp& op) {
    if (op.kind != AttentionKind::kBidirectional) return;
    if (std::ranges::find(shapes, op.shape) == shapes.end()) shapes.push_back(op.shape);
  });
  return {program.dtype, false, kTileSlots, shapes};
}

void KvPool::copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to,
                         ThreadPool& threads) {
  constexpr std::size_t kSliceBytes = std::size_t{1} << 18;
  // Each thread copies one slice of all blocks in order. So a later copy reads what an earlier one wrote.
  const auto slices = static_cast<std::int64_t>((block_bytes_ + kSliceBytes - 1) / kSliceBytes);
  threads.parallel_for(slices, 1, [&](std::int64_t begin, std::int64_t end, int /*thread*/) {
    const std::size_t first = static_cast<std::size_t>(begin) * kSliceBytes;
    const std::size_t bytes = std::min(static_cast<std::size_t>(end) * kSliceBytes, block_bytes_) - first;
    for (std::size_t i = 0; i < from.size(); ++i) {
      std::memcpy(memory_.data() + static_cast<std::size_t>(to[i]) * block_bytes_ + first,
                  memory_.data() + static_cast<std::size_t>(from[i]) * block_bytes_ + first, bytes);
    }
  });
}

}  // namespace adaptrt
