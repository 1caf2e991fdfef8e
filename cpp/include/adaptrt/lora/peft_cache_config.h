#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

/// How large the two levels of the LoRA cache are. Names and defaults are TensorRT-LLM's.
struct PeftCacheConfig {
  /// Host and device level in sets of weights of rank 1, one layer, one module of maximal width; 0: sized by
  /// bytes.
  std::int64_t num_host_module_layer = 0;
  std::int64_t num_device_module_layer = 0;
  /// A device page holds one whole adapter of this rank.
  std::int32_t optimal_adapter_size = 8;
  /// Each level must hold one whole adapter of this rank, or of the engine's max_lora_rank where that is
  /// lower.
  std::int32_t max_adapter_size = 64;
  std::int32_t num_put_workers = 1;
  std::int32_t num_ensure_workers = 1;
  std::int32_t num_copy_streams = 1;
  std::int32_t max_pages_per_block_host = 24;
  std::int32_t max_pages_per_block_device = 8;
  /// Device level as a fraction in (0, 1] of the free memory; by default 0.02, and more where that is too
  /// little.
  std::optional<double> device_cache_percent;
  /// Host level in bytes; by default 1 GiB, and more where that is too little.
  std::optional<std::size_t> host_cache_size;
  /// Directory whose digit-named folders hold adapters to load at start.
  std::optional<std::string> lora_prefetch_dir;

  friend bool operator==(const PeftCacheConfig&, const PeftCacheConfig&) = default;

  /// Everything wrong with the fields on their own.
  [[nodiscard]] Problems validate() const;
};

/// Bytes and pages for an engine; docs/decisions/lora-cache-sizes.md has the rules. `free_bytes` is the
/// memory that is available for the device level (on the CPU: the host's). All zero for an engine without
/// LoRA. Throws ConfigError when the config is invalid, when a level could not hold one adapter of maximal
/// size, with both figures, or when an engine without LoRA gets anything but the defaults.
[[nodiscard]] LoraCacheSizes resolve_cache_sizes(const PeftCacheConfig& config, const LoraLayout& layout,
                                                 std::size_t free_bytes);

}  // namespace adaptrt
