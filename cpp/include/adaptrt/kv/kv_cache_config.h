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
  /// Keeps full blocks of finished and running requests, and gives them to requests that start with the same
  /// tokens. Engines with an encoder also share the cross-attention KV of equal encoder inputs.
  bool enable_block_reuse = true;
  /// Maximum number of tokens in the pool, rounded down to whole blocks; nullopt: as many as the memory
  /// fraction allows.
  std::optional<std::int64_t> max_tokens;
  /// Accepted only if it changes nothing: windows of at least max_seq_len, or the model's own windows
  /// (ExecutorConfig::validate).
  std::optional<std::vector<std::int64_t>> max_attention_window;
  std::optional<std::int64_t> sink_token_length;  // refused unless 0
  /// Share of the memory that is free when the executor starts; nullopt: 0.9.
  std::optional<double> free_gpu_memory_fraction;
  /// Bytes of the second level, a file in host_cache_dir; nullopt or 0: no second level.
  std::optional<std::size_t> host_cache_size;
  bool onboard_blocks = true;  // refused when false: steps read only blocks in the pool
  /// Fraction of the KV memory for the cross-attention KV of encoder inputs, in engines with an encoder;
  /// nullopt: 0.5. Engines without an encoder accept only 0 or nullopt.
  std::optional<double> cross_kv_cache_fraction;
  /// Blocks of a lower retention priority do not go to the second level; nullopt: all do.
  std::optional<std::int32_t> secondary_offload_min_priority;
  /// Maximum number of events that are kept until KVCacheEventManager returns them; 0: no events.
  std::size_t event_buffer_max_size = 0;
  /// Reuses the common beginning of a block whose first tokens match a request's and whose later ones differ.
  bool enable_partial_reuse = true;
  /// True: partial reuse copies the block. False: the request takes the block over, but only if no request
  /// uses it and no block after it is cached.
  bool copy_on_partial_reuse = true;
  bool use_uvm = false;  // refused when true
  /// Directory of the second level's file, which outlives the process. Each executor needs its own directory.
  /// TensorRT-LLM has no such field.
  std::optional<std::string> host_cache_dir;
  /// Maximum number of snapshots of states, in engines that keep states: later requests reuse KV blocks only
  /// together with one. nullopt: two for each sequence of a batch, but at most a quarter of the cache's
  /// memory. TensorRT-LLM has no such field.
  std::optional<std::int32_t> max_state_snapshots;

  [[nodiscard]] bool has_second_level() const { return host_cache_size.value_or(0) > 0; }
  [[nodiscard]] Problems validate() const;
  bool operator==(const KvCacheConfig&) const = default;
};

/// Values that determine the number of KV blocks, in addition to the configuration.
struct KvPoolDemand {
  std::int32_t tokens_per_block = 0;
  /// Bytes of one block over all layers.
  std::size_t block_bytes = 0;
  /// Bytes of memory that are free now.
  std::size_t free_memory_bytes = 0;
  std::int32_t max_batch_size = 0;
  std::int32_t max_seq_len = 0;
  /// Part of the pool's memory that states take.
  std::size_t state_bytes = 0;
};

/// Values that determine the number of slots for states, in addition to the configuration.
struct StatePoolDemand {
  /// Bytes of one slot over all layers.
  std::size_t slot_bytes = 0;
  /// Bytes of memory that are free now.
  std::size_t free_memory_bytes = 0;
  std::int32_t max_batch_size = 0;
};

/// Numbers of slots for states.
struct StateSlots {
  std::int32_t num_sequences = 0;
  std::int32_t num_snapshots = 0;

  [[nodiscard]] std::int32_t total() const { return num_sequences + num_snapshots; }
};

/// Returns KvCacheConfig::cross_kv_cache_fraction, or its default for engines with an encoder.
[[nodiscard]] double cross_fraction_of(const KvCacheConfig& config);

/// Returns the number of blocks in the pool: enough for max_tokens if that is given, otherwise for
/// max_batch_size sequences of max_seq_len tokens. In both cases the fraction of the free memory is the upper
/// limit. Throws ConfigError if not even one block fits.
[[nodiscard]] std::int32_t resolve_num_blocks(const KvCacheConfig& config, const KvPoolDemand& demand);

/// Returns a slot for each sequence of a batch, and the configured number of snapshots or its default. Throws
/// ConfigError if they do not fit into the fraction of the free memory.
[[nodiscard]] StateSlots resolve_state_slots(const KvCacheConfig& config, const StatePoolDemand& demand);

}  // namespace adaptrt
