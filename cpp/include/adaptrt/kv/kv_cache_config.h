#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// TensorRT-LLM's KvCacheConfig. "Device" memory is the machine's on a CPU.
struct KvCacheConfig {
  /// Keep full blocks of finished and running requests, and give them to requests that start with the same
  /// tokens; of engines with an encoder, what decoders see of encoder inputs to requests with the same one.
  bool enable_block_reuse = true;
  /// Tokens that the pool holds at most, rounded down to whole blocks; nullopt: what the memory fraction
  /// allows.
  std::optional<std::int64_t> max_tokens;
  /// Taken where it changes nothing: windows of max_seq_len or more, or those that the model has
  /// (ExecutorConfig::validate).
  std::optional<std::vector<std::int64_t>> max_attention_window;
  std::optional<std::int64_t> sink_token_length;  // refused unless 0
  /// Share of the memory that is free when the executor starts; nullopt: 0.9.
  std::optional<double> free_gpu_memory_fraction;
  /// Bytes of the second level, a file in host_cache_dir; nullopt, 0: there is none.
  std::optional<std::size_t> host_cache_size;
  bool onboard_blocks = true;  // refused when false: steps read blocks in the pool alone
  /// Of engines with an encoder: the share of the KV memory that holds what decoders see of encoder inputs;
  /// nullopt: 0.5. Refused unless 0 for others.
  std::optional<double> cross_kv_cache_fraction;
  /// Blocks of a lower retention priority do not go to the second level; nullopt: all do.
  std::optional<std::int32_t> secondary_offload_min_priority;
  /// Events that are kept until KVCacheEventManager hands them out; 0: there are none.
  std::size_t event_buffer_max_size = 0;
  /// Of a block that a request begins like and goes on differently, take what they have in common.
  bool enable_partial_reuse = true;
  /// Copy it; else it is taken over, and only where no request uses it and no block behind it is cached.
  bool copy_on_partial_reuse = true;
  bool use_uvm = false;  // refused when true
  /// Directory of the second level's file, which outlives the process; one for each executor. Not in
  /// TensorRT-LLM.
  std::optional<std::string> host_cache_dir;

  [[nodiscard]] bool has_second_level() const { return host_cache_size.value_or(0) > 0; }
  [[nodiscard]] Problems validate() const;
  bool operator==(const KvCacheConfig&) const = default;
};

/// What the number of KV blocks follows from, besides the configuration.
struct KvPoolDemand {
  std::int32_t tokens_per_block = 0;
  /// Bytes of one block over all layers.
  std::size_t block_bytes = 0;
  /// Bytes that are free now.
  std::size_t free_memory_bytes = 0;
  std::int32_t max_batch_size = 0;
  std::int32_t max_seq_len = 0;
};

/// KvCacheConfig::cross_kv_cache_fraction of engines with an encoder.
[[nodiscard]] double cross_fraction_of(const KvCacheConfig& config);

/// Blocks of the pool: max_tokens' worth if that is given, else what max_batch_size sequences of max_seq_len
/// tokens can use; in both cases no more than the fraction of the free memory holds. Throws ConfigError when
/// that is not one.
[[nodiscard]] std::int32_t resolve_num_blocks(const KvCacheConfig& config, const KvPoolDemand& demand);

}  // namespace adaptrt
