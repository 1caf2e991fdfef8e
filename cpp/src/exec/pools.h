#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/config.h"
#include "adaptrt/kv/kv_cache_config.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/peft_cache_config.h"

namespace adaptrt {

/// Returns the sizes of an engine's LoRA cache; all are zero for an engine without LoRA. `free_memory`: bytes
/// for the device level. Throws ConfigError for invalid sizes.
[[nodiscard]] LoraCacheSizes lora_cache_sizes(const ExecutorConfig& config, const EngineInfo& engine,
                                              std::size_t free_memory);

/// Makes the cache of an engine's adapters; nullptr for an engine without LoRA. Subtracts the host memory
/// that its device level may take from `available_memory`. `reserved_device_memory`: bytes of device memory
/// for other uses. `loads`: the options of loads; the sizes follow from `config`. Throws ConfigError for
/// invalid sizes.
[[nodiscard]] std::unique_ptr<LoraCache> make_lora_cache(const PeftCacheConfig& config, Engine& engine,
                                                         std::int32_t max_batch_size,
                                                         std::size_t& available_memory,
                                                         std::size_t reserved_device_memory,
                                                         LoraCacheOptions loads);

/// Returns the number of KV blocks for the engine to allocate; 0 without a KV cache. They and the states take
/// a share of the device memory minus `reserved_device_memory` or, without a device, of the host's
/// `available_memory`. Throws ConfigError if the share is too small.
[[nodiscard]] std::int32_t count_kv_blocks(const ExecutorConfig& config, const Engine& engine,
                                           std::size_t available_memory, std::size_t reserved_device_memory);

/// Returns the same number for an engine that may use `free_memory` bytes.
[[nodiscard]] std::int32_t count_kv_blocks(const ExecutorConfig& config, const EngineInfo& info,
                                           std::size_t free_memory);

/// Returns the numbers of slots for states; zeros for an engine without states. It uses the same memory as
/// count_kv_blocks(). Throws ConfigError if it is too small.
[[nodiscard]] StateSlots count_state_slots(const ExecutorConfig& config, const Engine& engine,
                                           std::size_t available_memory, std::size_t reserved_device_memory);

/// Returns the same numbers for an engine that may use `free_memory` bytes.
[[nodiscard]] StateSlots count_state_slots(const ExecutorConfig& config, const EngineInfo& info,
                                           std::size_t free_memory);

/// Returns the number of blocks for encoder inputs; 0 without an encoder. It uses the same free memory as
/// count_kv_blocks(), so both are counted before the engine allocates either.
[[nodiscard]] std::int32_t count_cross_kv_blocks(const ExecutorConfig& config, const Engine& engine,
                                                 std::size_t available_memory,
                                                 std::size_t reserved_device_memory);

/// Returns the same number for an engine that may use `free_memory` bytes.
[[nodiscard]] std::int32_t count_cross_kv_blocks(const ExecutorConfig& config, const EngineInfo& info,
                                                 std::size_t free_memory);

}  // namespace adaptrt
