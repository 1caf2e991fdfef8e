#include "pools.h"

#include <algorithm>
#include <optional>
#include <thread>
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

/// Half of the CPUs, but no more than memory bandwidth needs.
std::int32_t threads_for_admissions() {
  return std::clamp(static_cast<std::int32_t>(std::thread::hardware_concurrency()) / 2, 1, 8);
}

}  // namespace

LoraCacheSizes lora_cache_sizes(const ExecutorConfig& config, const EngineInfo& engine,
                                std::size_t free_memory) {
  return resolve_cache_sizes(config.peft_cache_config.value_or(PeftCacheConfig{}), engine.lora, free_memory);
}

std::unique_ptr<LoraCache> make_lora_cache(const PeftCacheConfig& config, Engine& engine,
                                           std::int32_t max_batch_size, std::size_t& available_memory,
                                           std::size_t reserved_device_memory, LoraCacheOptions loads) {
  const LoraLayout& layout = engine.info().lora;
  const bool has_device_memory = engine.free_device_memory().has_value();
  const LoraCacheSizes sizes = resolve_cache_sizes(
      config, layout,
      LoraCacheDemand{.free_bytes = free_memory_of(engine, available_memory, reserved_device_memory),
                      .free_host_bytes = available_memory,
                      .max_batch_size = max_batch_size,
                      .device_level_grows = !has_device_memory});
  if (layout.sites.empty()) return nullptr;
  const std::int64_t pages = sizes.pages_to_make();
  if (!has_device_memory) {
    available_memory -= std::min(available_memory, sizes.page_bytes * static_cast<std::size_t>(pages));
  }
  LoraCacheOptions options = std::move(loads);
  options.host_bytes = sizes.host_bytes;
  options.device_pages = sizes.device_pages;
  options.max_host_bytes = sizes.max_host_bytes;
  options.num_adapters = max_batch_size;
  options.storage = config.storage();
  // Steps on a device need few CPUs.
  if (has_device_memory) options.num_admit_threads = threads_for_admissions();
  return std::make_unique<LoraCache>(
      layout, engine.make_adapter_pages(sizes.page_bytes, pages, config.num_copy_streams),
      std::move(options));
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
  if (info.has_states()) {
    const auto slots = static_cast<std::size_t>(count_state_slots(config, info, free_memory).total());
    demand.state_bytes = slots * info.state_bytes;
    // Without attention, blocks only count the tokens that snapshots of states can be reused for.
    demand.block_bytes = std::max(demand.block_bytes, std::size_t{1});
  }
  if (info.has_encoder()) {
    demand.free_memory_bytes = static_cast<std::size_t>(static_cast<double>(free_memory) *
                                                        (1.0 - cross_fraction_of(config.kv_cache_config)));
  }
  demand.max_batch_size = config.max_batch_size.value_or(info.max_batch_size);
  demand.max_seq_len = info.max_seq_len;
  return resolve_num_blocks(config.kv_cache_config, demand);
}

StateSlots count_state_slots(const ExecutorConfig& config, const Engine& engine, std::size_t available_memory,
                             std::size_t reserved_device_memory) {
  return count_state_slots(config, engine.info(),
                           free_memory_of(engine, available_memory, reserved_device_memory));
}

StateSlots count_state_slots(const ExecutorConfig& config, const EngineInfo& info, std::size_t free_memory) {
  if (!info.has_states()) return {};
  return resolve_state_slots(config.kv_cache_config,
                             {.slot_bytes = info.state_bytes,
                              .free_memory_bytes = free_memory,
                              .max_batch_size = config.max_batch_size.value_or(info.max_batch_size)});
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
