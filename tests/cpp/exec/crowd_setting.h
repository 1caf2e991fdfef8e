#pragma once

#include <cstdint>
#include <optional>
#include <ostream>

#include "adaptrt/exec/config.h"

namespace adaptrt::test {

/// Settings that must not change any result of a crowd.
struct CrowdSetting {
  CapacitySchedulerPolicy policy;
  std::int64_t kv_tokens;
  std::int32_t max_num_tokens;
  bool reuse;
  std::optional<std::int32_t> max_batch_size = std::nullopt;  // the engine's
};

inline std::ostream& operator<<(std::ostream& out, const CrowdSetting& setting) {
  out << "policy " << static_cast<int>(setting.policy) << ", kv " << setting.kv_tokens << ", step "
      << setting.max_num_tokens << ", reuse " << setting.reuse;
  if (setting.max_batch_size) out << ", batch " << *setting.max_batch_size;
  return out;
}

inline ExecutorConfig config_of(const CrowdSetting& setting) {
  ExecutorConfig config;
  config.scheduler_config.capacity_scheduler_policy = setting.policy;
  config.kv_cache_config.max_tokens = setting.kv_tokens;
  config.kv_cache_config.enable_block_reuse = setting.reuse;
  config.enable_chunked_context = true;
  config.max_num_tokens = setting.max_num_tokens;
  config.max_batch_size = setting.max_batch_size;
  config.request_stats_max_iterations = 10;
  return config;
}

}  // namespace adaptrt::test
