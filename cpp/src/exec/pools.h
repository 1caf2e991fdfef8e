#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/config.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

/// The cache of an engine's adapters; nullptr for one without LoRA. Takes what it allocates of the host's
/// from `available_memory`. `reserved_device_memory`: bytes of the engine's own memory that others will take.
/// Throws ConfigError for sizes that cannot be.
[[nodiscard]] std::unique_ptr<LoraCache> make_lora_cache(const ExecutorConfig& config, Engine& engine,
                                                         std::size_t& available_memory,
                                                         std::size_t reserved_device_memory,
                                                         std::function<void()> on_load_end);

/// Number of KV blocks for the engine to allocate; 0 where it has no KV cache. They take a share of the
/// engine's own memory without `reserved_device_memory` or, where it has none, of `available_memory`, which
/// is the host's. Throws ConfigError for a share that is too small.
[[nodiscard]] std::int32_t count_kv_blocks(const ExecutorConfig& config, const Engine& engine,
                                           std::size_t available_memory, std::size_t reserved_device_memory);

/// Number of blocks for encoder inputs; 0 where the engine has no encoder. As count_kv_blocks(), which goes
/// by the same free memory: both are counted before the engine allocates either.
[[nodiscard]] std::int32_t count_cross_kv_blocks(const ExecutorConfig& config, const Engine& engine,
                                                 std::size_t available_memory,
                                                 std::size_t reserved_device_memory);

}  // namespace adaptrt
