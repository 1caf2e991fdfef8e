#pragma once

#include <cstdint>
#include <memory>

#include "adaptrt/engine/engine.h"
#include "adaptrt/kv/kv_cache_config.h"
#include "adaptrt/kv_file/kv_file_level.h"

namespace adaptrt {

/// Throws ConfigError if the size of an engine's second level, where one is configured, holds no block.
void check_second_level_size(const KvCacheConfig& config, const EngineInfo& engine);

/// Makes the second level of an engine's KV cache with a pool of `num_kv_blocks` blocks; nullptr if none is
/// configured. The engine must outlive it. Throws ConfigError for an unusable directory.
[[nodiscard]] std::unique_ptr<KvFileLevel> make_second_level(const KvCacheConfig& config, Engine& engine,
                                                             std::int32_t num_kv_blocks);

/// The same for the `num_snapshots` snapshots of an engine with states, which get half of the size; nullptr
/// also for other engines.
[[nodiscard]] std::unique_ptr<KvFileLevel> make_second_level_of_states(const KvCacheConfig& config,
                                                                       Engine& engine,
                                                                       std::int32_t num_snapshots);

}  // namespace adaptrt
