#include "adaptrt/kv/kv_cache_config.h"

#include <algorithm>
#include <limits>
#include <string>

#include "adaptrt/kv/block_pool.h"

namespace adaptrt {

namespace {

constexpr double kDefaultMemoryFraction = 0.9;

double fraction_of(const KvCacheConfig& config) {
  return config.free_gpu_memory_fraction.value_or(kDefaultMemoryFraction);
}

/// Returns the bytes that the cache may take.
double share_of(const KvCacheConfig& config, std::size_t free_memory_bytes) {
  return static_cast<double>(free_memory_bytes) * fraction_of(config);
}

void check_second_level(const KvCacheConfig& config, Problems& problems) {
  const bool has_size = config.has_second_level();
  const std::string size = "host_cache_size is " + std::to_string(config.host_cache_size.value_or(0));
  if (has_size && !config.host_cache_dir) {
    problems.add(size +
                 " and host_cache_dir is None; accepted: both, since blocks go to a file there, or neither");
  }
  if (config.host_cache_dir && !has_size) {
    problems.add("host_cache_dir is '" + *config.host_cache_dir +
                 "' and host_cache_size is None or 0; accepted: both, or neither");
  }
  if (config.host_cache_dir && config.host_cache_dir->empty()) {
    problems.add("host_cache_dir is empty; accepted: None, or the path of a directory");
  }
  if (has_size && !config.enable_block_reuse) {
    problems.add(size + " and enable_block_reuse is False; accepted: True, or nothing would be read back");
  }
  if (config.use_uvm) {
    problems.add("use_uvm is True; accepted: False, the engine allocates the KV cache itself");
  }
  if (!config.onboard_blocks) {
    problems.add("onboard_blocks is False; accepted: True, steps read KV blocks where the pool is");
  }
  if (!config.secondary_offload_min_priority) return;
  const std::int32_t priority = *config.secondary_offload_min_priority;
  const std::string text = "secondary_offload_min_priority is " + std::to_string(priority);
  if (priority < 0 || priority > kMaxRetentionPriority) {
    problems.add(text + "; accepted: None, and 0 to " + std::to_string(kMaxRetentionPriority));
  } else if (!has_size) {
    problems.add(text + " and host_cache_size is None or 0; accepted: None, because nothing is offloaded");
  }
}

}  // namespace

Problems KvCacheConfig::validate() const {
  Problems problems;
  if (max_tokens && *max_tokens < 1) {
    problems.add("max_tokens is " + std::to_string(*max_tokens) + "; it must be at least 1");
  }
  if (max_attention_window && max_attention_window->empty()) {
    problems.add("max_attention_window is empty; accepted: None, or one window or more");
  }
  if (sink_token_length.value_or(0) != 0) {
    problems.add("sink_token_length is " + std::to_string(*sink_token_length) +
                 "; accepted: None and 0, because attention windows and sinks are fixed by the model");
  }
  // The condition is negated so that NaN is refused as well.
  if (free_gpu_memory_fraction && !(*free_gpu_memory_fraction > 0.0 && *free_gpu_memory_fraction <= 1.0)) {
    problems.add("free_gpu_memory_fraction is " + std::to_string(*free_gpu_memory_fraction) +
                 "; it must be above 0 and at most 1");
  }
  check_second_level(*this, problems);
  if (max_state_snapshots && *max_state_snapshots < 0) {
    problems.add("max_state_snapshots is " + std::to_string(*max_state_snapshots) +
                 "; accepted: None, 0 or more");
  } else if (max_state_snapshots.value_or(0) > 0 && !enable_block_reuse) {
    problems.add("max_state_snapshots is " + std::to_string(*max_state_snapshots) +
                 " and enable_block_reuse is False; accepted: True, or no request would start from them");
  }
  // The condition is negated so that NaN is refused as well.
  if (cross_kv_cache_fraction && !(*cross_kv_cache_fraction >= 0.0 && *cross_kv_cache_fraction < 1.0)) {
    problems.add("cross_kv_cache_fraction is " + std::to_string(*cross_kv_cache_fraction) +
                 "; it must be at least 0 and below 1");
  }
  return problems;
}

double cross_fraction_of(const KvCacheConfig& config) {
  constexpr double kDefaultCrossFraction = 0.5;
  return config.cross_kv_cache_fraction.value_or(kDefaultCrossFraction);
}

std::int32_t resolve_num_blocks(const KvCacheConfig& config, const KvPoolDemand& demand) {
  config.validate().throw_if_any<ConfigError>("KvCacheConfig");
  if (demand.tokens_per_block < 1 || demand.block_bytes < 1 || demand.max_batch_size < 1 ||
      demand.max_seq_len < 1) {
    throw ConfigError(
        "the engine's tokens_per_block, KV block bytes, max_batch_size and max_seq_len must be positive");
  }
  const double fraction = fraction_of(config);
  constexpr std::int64_t kMostBlocks = std::numeric_limits<BlockId>::max();
  // Limit the value before the conversion, which is undefined for values outside int64.
  const auto affordable = static_cast<std::int64_t>(std::min(
      std::max(0.0, share_of(config, demand.free_memory_bytes) - static_cast<double>(demand.state_bytes)) /
          static_cast<double>(demand.block_bytes),
      static_cast<double>(kMostBlocks)));
  const std::int64_t blocks_per_sequence =
      (std::int64_t{demand.max_seq_len} + demand.tokens_per_block - 1) / demand.tokens_per_block;
  const std::int64_t wanted = config.max_tokens ? *config.max_tokens / demand.tokens_per_block
                                                : blocks_per_sequence * demand.max_batch_size;
  if (wanted < 1) {
    throw ConfigError("KvCacheConfig: max_tokens is " + std::to_string(*config.max_tokens) +
                      ", less than one block of " + std::to_string(demand.tokens_per_block) + " tokens");
  }
  if (affordable < 1) {
    throw ConfigError("KvCacheConfig: one KV block takes " + std::to_string(demand.block_bytes) + " bytes; " +
                      std::to_string(fraction) + " of the " + std::to_string(demand.free_memory_bytes) +
                      " bytes of free memory do not hold it" +
                      (demand.state_bytes == 0 ? "" : " next to the states"));
  }
  return static_cast<std::int32_t>(std::min({wanted, affordable, kMostBlocks}));
}

StateSlots resolve_state_slots(const KvCacheConfig& config, const StatePoolDemand& demand) {
  config.validate().throw_if_any<ConfigError>("KvCacheConfig");
  if (demand.slot_bytes < 1 || demand.max_batch_size < 1) {
    throw ConfigError("the engine's bytes of states and max_batch_size must be positive");
  }
  const double share = share_of(config, demand.free_memory_bytes);
  const auto slot_bytes = static_cast<double>(demand.slot_bytes);
  StateSlots slots{.num_sequences = demand.max_batch_size};
  if (config.enable_block_reuse) {
    // Limit the value before the conversion, which is undefined for values outside int32.
    const std::int64_t wanted = std::int64_t{2} * demand.max_batch_size;
    const double affordable = std::min(share / 4.0 / slot_bytes, static_cast<double>(wanted));
    slots.num_snapshots = config.max_state_snapshots.value_or(static_cast<std::int32_t>(affordable));
  }
  const auto bytes_for = [&](std::int32_t count) { return static_cast<double>(count) * slot_bytes; };
  const bool has_room =
      bytes_for(slots.num_sequences) + bytes_for(slots.num_snapshots) <= share &&
      std::int64_t{slots.num_sequences} + slots.num_snapshots <= std::numeric_limits<std::int32_t>::max();
  if (has_room) return slots;
  throw ConfigError("KvCacheConfig: the states of max_batch_size " + std::to_string(slots.num_sequences) +
                    " sequences and " + std::to_string(slots.num_snapshots) +
                    " snapshots (max_state_snapshots) take " + std::to_string(demand.slot_bytes) +
                    " bytes each; " + std::to_string(fraction_of(config)) + " of the " +
                    std::to_string(demand.free_memory_bytes) + " bytes of free memory do not hold them");
}

}  // namespace adaptrt
