#include "pools.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "adaptrt/kv/kv_cache_config.h"

namespace adaptrt {
namespace {

/// Returns the memory still free for the engine: its device's or, without a device, the host's.
std::size_t free_memory_of(const Engine& engine, std::size_t available_memory,
                           std::size_t reserved_device_memory) {
  const auto on_device = engine.free_device_memory();
  return on_device ? *on_device - std::min(*on_device, reserved_device_memory) : available_memory;
}

}  // namespace

LoraCacheSizes lora_cache_sizes(const ExecutorConfig& config, const EngineInfo& engine,
                                std::size_t free_memory) {
  return resolve_cache_sizes(config.peft_cache_config.value_or(PeftCacheConfig{}), engine.lora, free_memory);
}

std::unique_ptr<LoraCache> make_lora_cache(const ExecutorConfig& config, Engine& engine,
                                           std::size_t& available_memory, std::size_t reserved_device_memory,
                                           std::function<void()> on_load_end) {
  const PeftCacheConfig cache_config = config.peft_cache_config.value_or(PeftCacheConfig{});
  const LoraLayout& layout = engine.info().lora;
  const LoraCacheSizes sizes = lora_cache_sizes(
      config, engine.info(), free_memory_of(engine, available_memory, reserved_device_memory));
  if (layout.sites.empty()) return nullptr;
  // The device level is allocated now; the host level grows as adapters arrive.
  if (!engine.free_device_memory()) {
    available_memory -=
        std::min(available_memory, sizes.page_bytes * static_cast<std::size_t>(sizes.device_pages));
  }
  return std::make_unique<LoraCache>(
      layout, engine.make_adapter_pages(sizes.page_bytes, sizes.device_pages, cache_config.num_copy_streams),
      LoraCacheOptions{.host_bytes = sizes.host_bytes,
                       .num_load_workers = cache_config.num_ensure_workers,
                       .on_load_end = std::move(on_load_end)});
}

std::int32_t count_kv_blocks(const ExecutorConfig& config, const Engine& engine, std::size_t available_memory,
                             std::size_t reserved_device_memory) {
  return count_kv_blocks(config, engine.info(),
                         free_memory_of(engine, available_memory, reserved_device_memory));
}

std::int32_t count_kv_blocks(const ExecutorConfig& config, const EngineInfo& info, std::size_t free_memory) {
  if (!info.has_kv_cache) return 0;
  KvPoolDemand demand;
  demand.tokens_per_block = info.tokens_per_block;
  demand.block_bytes = info.kv_block_bytes;
  demand.free_memory_bytes = free_memory;
  if (info.has_encoder()) {
    demand.free_memory_bytes = static_cast<std::size_t>(static_cast<double>(free_memory) *
                                                        (1.0 - cross_fraction_of(config.kv_cache_config)));
  }
  demand.max_batch_size = config.max_batch_size.value_or(info.max_batch_size);
  demand.max_seq_len = info.max_seq_len;
  return resolve_num_blocks(config.kv_cache_config, demand);
}

std::int32_t count_cross_kv_blocks(const ExecutorConfig& config, const Engine& engine,
                                   std::size_t available_memory, std::size_t reserved_device_memory) {
  return count_cross_kv_blocks(config, engine.info(),
                               free_memory_of(engine, available_memory, reserved_device_memory));
}

std::int32_t count_cross_kv_blocks(const ExecutorConfig& config, const EngineInfo& info,
                                   std::size_t free_memory) {
  if (!info.has_encoder()) return 0;
  KvPoolDemand demand;
  demand.tokens_per_block = info.tokens_per_block;
  demand.block_bytes = info.cross_kv_block_bytes;
  demand.free_memory_bytes =
      static_cast<std::size_t>(static_cast<double>(free_memory) * cross_fraction_of(config.kv_cache_config));
  demand.max_batch_size = config.max_batch_size.value_or(info.max_batch_size);
  demand.max_seq_len = info.max_encoder_input_len;
  return resolve_num_blocks(config.kv_cache_config, demand);
}

}  // namespace adaptrt
