#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

/// Sizes of the two levels of the LoRA cache. Names and defaults are TensorRT-LLM's; fields_of() describes
/// them.
struct PeftCacheConfig {
  std::int64_t num_host_module_layer = 0;
  std::int64_t num_device_module_layer = 0;
  std::int32_t optimal_adapter_size = 8;
  std::int32_t max_adapter_size = 64;
  std::int32_t num_put_workers = 1;
  std::int32_t num_ensure_workers = 1;
  std::int32_t num_copy_streams = 1;
  std::int32_t max_pages_per_block_host = 24;
  std::int32_t max_pages_per_block_device = 8;
  std::optional<double> device_cache_percent;
  std::optional<std::size_t> host_cache_size;
  std::optional<std::string> lora_prefetch_dir;
  std::string lora_storage{name_of(LoraStorage::kExact)};

  friend bool operator==(const PeftCacheConfig&, const PeftCacheConfig&) = default;

  /// Lists all problems of the fields themselves.
  [[nodiscard]] Problems validate() const;
  /// The value of lora_storage, which is valid.
  [[nodiscard]] LoraStorage storage() const;
};

constexpr auto fields_of(const PeftCacheConfig* /*type*/) {
  using C = PeftCacheConfig;
  return FieldList{
      Field{"num_host_module_layer", &C::num_host_module_layer,
            "Host level in sets of weights of rank 1, one layer, one module of maximal width; 0: sized by "
            "bytes."},
      Field{"num_device_module_layer", &C::num_device_module_layer,
            "The same for the device level; 0: sized by device_cache_percent."},
      Field{"optimal_adapter_size", &C::optimal_adapter_size,
            "A device page holds one whole adapter of this rank."},
      Field{"max_adapter_size", &C::max_adapter_size,
            "Each level must hold one whole adapter of this rank, or of the engine's max_lora_rank if that "
            "is less."},
      Field{"num_put_workers", &C::num_put_workers,
            "No effect: the thread that enqueues a request stores its adapter."},
      Field{"num_ensure_workers", &C::num_ensure_workers,
            "Number of threads that load adapters to the device level while the batch runs; 0: the "
            "executor's thread loads them between steps, when their requests start."},
      Field{"num_copy_streams", &C::num_copy_streams,
            "Streams that copy adapters to a device with its own memory; no effect on a CPU."},
      Field{"max_pages_per_block_host", &C::max_pages_per_block_host,
            "No effect: host memory is not divided into blocks."},
      Field{"max_pages_per_block_device", &C::max_pages_per_block_device,
            "No effect: all pages are one block."},
      Field{"device_cache_percent", &C::device_cache_percent,
            "Device level as a fraction in (0, 1] of the free memory; None: 0.02, or more if that is too "
            "small. On a CPU it then grows with its adapters, to hold as many as max_batch_size of the "
            "largest, "
            "up to 0.25 of the free memory."},
      Field{"host_cache_size", &C::host_cache_size,
            "Host level in bytes; None: 1 GiB, or more if that is too small. It then grows in the same way."},
      Field{"lora_prefetch_dir", &C::lora_prefetch_dir,
            "Directory whose digit-named folders hold adapters to load at start."},
      Field{"lora_storage", &C::lora_storage,
            "How the device level stores adapters' matrices: 'exact', in the engine's type; 'compressed', "
            "bfloat16 in twelve bits without changing a value; 'int8', rounded to integers with one scale "
            "for each rank, which changes results. The last two need a CPU."}};
}

/// Values that determine default sizes, in addition to the configuration.
struct LoraCacheDemand {
  /// Free memory for the device level: the device's, or the host's if the engine computes there.
  std::size_t free_bytes = 0;
  /// Free memory for the host level.
  std::size_t free_host_bytes = 0;
  /// Number of adapters that both levels should hold. Levels grow only if it is above 0.
  std::int32_t max_batch_size = 0;
  /// True if the device level can grow: its pages take memory only when they are written.
  bool device_level_grows = true;
};

/// Returns bytes and pages for an engine by the rules of docs/decisions/lora-cache.md. All are zero for an
/// engine without LoRA. Throws ConfigError for an invalid config, for a level that cannot hold one
/// adapter of maximal size (with both sizes), and for sizes or adapters given to an engine without LoRA.
[[nodiscard]] LoraCacheSizes resolve_cache_sizes(const PeftCacheConfig& config, const LoraLayout& layout,
                                                 const LoraCacheDemand& demand);
/// The same for levels that do not grow.
[[nodiscard]] LoraCacheSizes resolve_cache_sizes(const PeftCacheConfig& config, const LoraLayout& layout,
                                                 std::size_t free_bytes);

}  // namespace adaptrt
