#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/gpu/gpu_model_description.h"

namespace adaptrt {

/// The KV pool on a device: one tensor [blocks, 2, kv_heads, tokens_per_block, head_dim] per layer, or with 1
/// in place of 2 if values are keys. The model updates it in place. Layers without a pool of their own have
/// nothing.
class KvPools {
 public:
  explicit KvPools(const GpuModelDescription& model);

  /// Bytes of one block over all layers.
  [[nodiscard]] std::size_t block_bytes() const { return block_bytes_; }
  /// Returns 0 before allocate().
  [[nodiscard]] std::int32_t num_blocks() const { return num_blocks_; }

  /// Allocates the pool, filled with zeros, so that masked-out values in unwritten rows are finite. Throws
  /// ConfigError if the memory cannot be allocated, if the model does not accept this size, or on a second
  /// call.
  void allocate(std::int32_t num_blocks, Device& device, Stream& stream);
  /// Copies blocks from[i] to to[i] in every layer, one after the other.
  void copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to,
                   Stream& stream) const;
  /// Returns each layer's pool; call after allocate().
  [[nodiscard]] std::vector<DeviceArray> arrays() const;

 private:
  struct Layer {
    std::int64_t planes = 0;  ///< keys, and values if they are not keys
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::size_t block_bytes = 0;
    Allocation memory;
  };

  std::int64_t tokens_per_block_;
  std::int32_t max_blocks_;
  std::vector<Layer> layers_;
  std::size_t block_bytes_ = 0;
  std::int32_t num_blocks_ = 0;
};

}  // namespace adaptrt
