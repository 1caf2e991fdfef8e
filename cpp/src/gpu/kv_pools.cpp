#include "kv_pools.h"

#include <string>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

KvPools::KvPools(const GpuModelDescription& model)
    : tokens_per_block_(model.tokens_per_block), max_blocks_(model.max_kv_blocks) {
  for (const AttentionShape& shape : model.attention) {
    const auto keys = static_cast<std::size_t>(shape.key_value_size() * tokens_per_block_);
    const auto scales = static_cast<std::size_t>(shape.num_key_value_heads * tokens_per_block_);
    const std::size_t bytes =
        model.int8_kv_cache ? keys + scales * sizeof(float) : keys * size_of(model.dtype);
    const std::int64_t planes = shape.values_are_keys ? 1 : 2;
    layers_.push_back({.planes = planes,
                       .kv_heads = shape.num_key_value_heads,
                       .head_dim = shape.head_dim,
                       .block_bytes = static_cast<std::size_t>(planes) * bytes,
                       .memory = {}});
    block_bytes_ += layers_.back().block_bytes;
  }
}

void KvPools::allocate(std::int32_t num_blocks, Device& device, Stream& stream) {
  if (num_blocks_ != 0) throw ConfigError("the KV pool was allocated before");
  if (num_blocks < 1 || num_blocks > max_blocks_) {
    throw ConfigError("the KV pool cannot have " + std::to_string(num_blocks) +
                      " blocks; the engine accepts 1 to " + std::to_string(max_blocks_));
  }
  std::vector<Allocation> pools;
  for (const Layer& layer : layers_) {
    const std::size_t bytes = layer.block_bytes * static_cast<std::size_t>(num_blocks);
    if (bytes == 0) {
      pools.emplace_back();
      continue;
    }
    pools.push_back(device.allocate(bytes));
    stream.fill_zero(pools.back().data(), bytes);
  }
  stream.synchronize();
  for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].memory = std::move(pools[i]);
  num_blocks_ = num_blocks;
}

void KvPools::copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to,
                          Stream& stream) const {
  for (std::size_t i = 0; i < from.size(); ++i) {
    for (const Layer& layer : layers_) {
      if (layer.block_bytes == 0) continue;
      stream.copy_on_device(layer.memory.data() + static_cast<std::size_t>(to[i]) * layer.block_bytes,
                            layer.memory.data() + static_cast<std::size_t>(from[i]) * layer.block_bytes,
                            layer.block_bytes);
    }
  }
}

std::vector<DeviceArray> KvPools::arrays() const {
  std::vector<DeviceArray> pools;
  for (const Layer& layer : layers_) {
    pools.push_back({.dims = {num_blocks_, layer.planes, layer.kv_heads, tokens_per_block_, layer.head_dim},
                     .address = layer.memory.data()});
  }
  return pools;
}

}  // namespace adaptrt
