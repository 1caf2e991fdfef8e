#pragma once

#include <cstdint>
#include <memory>

#include "adaptrt/engine/engine.h"
#include "adaptrt/kv/kv_cache_config.h"
#include "adaptrt/kv_file/kv_file_level.h"

namespace adaptrt {

/// The second level of an engine's KV cache, whose pool has so many blocks; nullptr where the configuration
/// has none. The engine outlives it. Throws ConfigError for a directory that cannot be used.
[[nodiscard]] std::unique_ptr<KvFileLevel> make_second_level(const KvCacheConfig& config, Engine& engine,
                                                             std::int32_t num_kv_blocks);

}  // namespace adaptrt
