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
/// from `available_memory`. Throws ConfigError for sizes that cannot be.
[[nodiscard]] std::unique_ptr<LoraCache> make_lora_cache(const ExecutorConfig& config, Engine& engine,
                                                         std::size_t& available_memory,
                                                         std::function<void()> on_load_end);

/// Has the engine allocate its KV blocks; how many there are, 0 where it has no KV cache. `available_memory`
/// is the host's, of which they take a share where the engine has none of its own. Throws ConfigError for a
/// share that is too small.
[[nodiscard]] std::int32_t make_kv_pool(const ExecutorConfig& config, Engine& engine,
                                        std::size_t available_memory);

/// The same of blocks for encoder inputs; 0 where the engine has no encoder.
[[nodiscard]] std::int32_t make_cross_kv_pool(const ExecutorConfig& config, Engine& engine,
                                              std::size_t available_memory);

}  // namespace adaptrt
