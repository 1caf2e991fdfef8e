#include "kv_pools.h"

#include <array>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

KvPools::KvPools(const TensorRtProgram& program)
    : num_layers_(program.num_layers),
      kv_heads_(program.shape.num_key_value_heads),
      tokens_per_block_(program.tokens_per_block),
      head_dim_(program.shape.head_dim),
      max_blocks_(program.max_kv_blocks),
      block_bytes_(2 * static_cast<std::size_t>(kv_heads_ * tokens_per_block_ * head_dim_) *
                   size_of(program.dtype)) {}

void KvPools::allocate(std::int32_t num_blocks, Device& device, Stream& stream) {
  if (num_blocks_ != 0) throw ConfigError("the KV pool was allocated before");
  if (num_blocks < 1 || num_blocks > max_blocks_) {
    throw ConfigError("the KV pool cannot have " + std::to_string(num_blocks) +
                      " blocks; the engine accepts 1 to " + std::to_string(max_blocks_));
  }
  const std::size_t bytes = block_bytes_ * static_cast<std::size_t>(num_blocks);
  std::vector<Allocation> layers;
  for (std::int32_t layer = 0; layer < num_layers_; ++layer) {
    layers.push_back(device.allocate(bytes));
    stream.fill_zero(layers.back().data(), bytes);
  }
  stream.synchronize();
  layers_ = std::move(layers);
  num_blocks_ = num_blocks;
}

void KvPools::copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to,
                          Stream& stream) const {
  for (std::size_t i = 0; i < from.size(); ++i) {
    for (const Allocation& layer : layers_) {
      stream.copy_on_device(layer.data() + static_cast<std::size_t>(to[i]) * block_bytes_,
                            layer.data() + static_cast<std::size_t>(from[i]) * block_bytes_, block_bytes_);
    }
  }
}

void KvPools::bind(PlanRunner& runner) const {
  const std::array<std::int64_t, 5> dims{num_blocks_, 2, kv_heads_, tokens_per_block_, head_dim_};
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    runner.set_input("kv_pool." + std::to_string(layer), dims, layers_[layer].data());
    runner.set_output("kv_pool_out." + std::to_string(layer), layers_[layer].data());
  }
}

}  // namespace adaptrt
