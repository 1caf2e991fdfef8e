#include "adaptrt/lora/peft_cache_config.h"

#include <algorithm>
#include <limits>
#include <string>

#include "adapter_bounds.h"
#include "adaptrt/lora/device_plan.h"

namespace adaptrt {
namespace {

constexpr double kDefaultDevicePercent = 0.02;
constexpr std::size_t kDefaultHostBytes = std::size_t{1} << 30;
/// In addition to one adapter of maximal size, a default level holds this many of the optimal size.
constexpr std::int64_t kDefaultOptimalAdapters = 8;
/// Share of the free memory up to which a level grows.
constexpr double kDefaultShareOfMemory = 0.25;
constexpr std::int32_t kMostEnsureWorkers = 16;
constexpr std::int32_t kMostCopyStreams = 16;
/// Far above any rank in use, and low enough that sizes cannot overflow.
constexpr std::int32_t kLargestAdapterSize = 1 << 16;

std::size_t saturating_product(std::size_t a, std::size_t b) {
  return b != 0 && a > std::numeric_limits<std::size_t>::max() / b ? std::numeric_limits<std::size_t>::max()
                                                                   : a * b;
}

/// The adapters that determine the sizes.
struct Reference {
  std::int32_t optimal_rank;
  std::int32_t max_rank;
};

Reference reference_ranks(const PeftCacheConfig& config, const LoraLayout& layout) {
  const std::int32_t max_rank = std::min(config.max_adapter_size, layout.max_rank);
  return {std::min(config.optimal_adapter_size, max_rank), max_rank};
}

[[noreturn]] void refuse(const std::string& what) {
  throw ConfigError("PeftCacheConfig: " + what);
}

std::string bytes_text(std::size_t bytes) {
  return std::to_string(bytes) + " bytes";
}

/// Resets fields that only tune, so that without LoRA only the other fields are refused.
PeftCacheConfig without_hints(PeftCacheConfig config) {
  const PeftCacheConfig defaults;
  config.num_put_workers = defaults.num_put_workers;
  config.num_ensure_workers = defaults.num_ensure_workers;
  config.num_copy_streams = defaults.num_copy_streams;
  config.max_pages_per_block_host = defaults.max_pages_per_block_host;
  config.max_pages_per_block_device = defaults.max_pages_per_block_device;
  return config;
}

std::size_t resolve_host(const PeftCacheConfig& config, const LoraLayout& layout, Reference ranks) {
  const std::size_t needed = host_adapter_bytes(layout, ranks.max_rank);
  if (!config.host_cache_size && config.num_host_module_layer == 0) {
    const std::size_t few = kDefaultOptimalAdapters * host_adapter_bytes(layout, ranks.optimal_rank);
    return std::max(kDefaultHostBytes, needed + few);
  }
  const bool by_bytes = config.host_cache_size.has_value();
  const std::size_t bytes = by_bytes
                                ? *config.host_cache_size
                                : saturating_product(static_cast<std::size_t>(config.num_host_module_layer),
                                                     widest_module_bytes(layout));
  if (bytes < needed) {
    const std::string field = by_bytes ? "host_cache_size" : "num_host_module_layer";
    refuse(field + " gives the host level " + bytes_text(bytes) + ", but one adapter of rank " +
           std::to_string(ranks.max_rank) + " on every enabled module needs " + bytes_text(needed) +
           "; raise " + field + " or lower max_adapter_size");
  }
  return bytes;
}

std::int64_t resolve_device_pages(const PeftCacheConfig& config, const LoraLayout& layout, Reference ranks,
                                  std::size_t page_bytes, std::size_t free_bytes) {
  const std::int64_t needed = device_adapter_pages(layout, ranks.max_rank, page_bytes);
  const auto pages_in = [&](double fraction) {
    return static_cast<std::int64_t>(fraction * static_cast<double>(free_bytes) /
                                     static_cast<double>(page_bytes));
  };
  const auto size_text = [&](std::int64_t pages) {
    return std::to_string(pages) + " pages of " + bytes_text(page_bytes);
  };
  std::string field = "the default";
  std::int64_t pages = 0;
  if (config.num_device_module_layer > 0) {
    field = "num_device_module_layer";
    const std::size_t bytes = saturating_product(static_cast<std::size_t>(config.num_device_module_layer),
                                                 widest_module_bytes(layout));
    pages = static_cast<std::int64_t>(bytes / page_bytes + (bytes % page_bytes != 0 ? 1 : 0));
  } else if (config.device_cache_percent) {
    field = "device_cache_percent";
    pages = pages_in(*config.device_cache_percent);
  } else {
    pages = std::max(pages_in(kDefaultDevicePercent), needed + kDefaultOptimalAdapters);
  }
  if (pages < needed) {
    refuse(field + " gives the device level " + size_text(pages) + ", but one adapter of rank " +
           std::to_string(ranks.max_rank) + " on every enabled module needs " + std::to_string(needed) +
           " pages; raise " + field + " or lower max_adapter_size");
  }
  if (saturating_product(static_cast<std::size_t>(pages), page_bytes) > free_bytes) {
    refuse(field + " gives the device level " + size_text(pages) + ", but only " + bytes_text(free_bytes) +
           " of memory are free");
  }
  return pages;
}

}  // namespace

Problems PeftCacheConfig::validate() const {
  Problems problems;
  const auto check_count = [&](const char* name, std::int64_t value) {
    if (value < 0) problems.add(std::string(name) + " is " + std::to_string(value) + "; accepted: 0 or more");
  };
  const auto check_between = [&](const char* name, std::int32_t value, std::int32_t least,
                                 std::int32_t most) {
    if (value < least || value > most) {
      problems.add(std::string(name) + " is " + std::to_string(value) +
                   "; accepted: " + std::to_string(least) + " to " + std::to_string(most));
    }
  };
  const auto check_unused = [&](const char* name, std::int32_t value) {
    if (value < 1) problems.add(std::string(name) + " is " + std::to_string(value) + "; accepted: 1 or more");
  };
  check_count("num_host_module_layer", num_host_module_layer);
  check_count("num_device_module_layer", num_device_module_layer);
  check_between("optimal_adapter_size", optimal_adapter_size, 1, kLargestAdapterSize);
  check_between("max_adapter_size", max_adapter_size, 1, kLargestAdapterSize);
  check_unused("num_put_workers", num_put_workers);
  check_between("num_ensure_workers", num_ensure_workers, 0, kMostEnsureWorkers);
  check_between("num_copy_streams", num_copy_streams, 1, kMostCopyStreams);
  check_unused("max_pages_per_block_host", max_pages_per_block_host);
  check_unused("max_pages_per_block_device", max_pages_per_block_device);
  if (device_cache_percent && !(*device_cache_percent > 0.0 && *device_cache_percent <= 1.0)) {
    problems.add("device_cache_percent is " + std::to_string(*device_cache_percent) +
                 "; accepted: a fraction above 0 and up to 1");
  }
  if (num_host_module_layer > 0 && host_cache_size) {
    problems.add("num_host_module_layer and host_cache_size both size the host level; set one of them");
  }
  if (num_device_module_layer > 0 && device_cache_percent) {
    problems.add(
        "num_device_module_layer and device_cache_percent both size the device level; set one of them");
  }
  if (std::ranges::find(kLoraStorageNames, lora_storage) == kLoraStorageNames.end()) {
    std::string accepted;
    for (const std::string_view name : kLoraStorageNames) {
      accepted += (accepted.empty() ? "'" : ", '") + std::string(name) + "'";
    }
    problems.add("lora_storage is '" + lora_storage + "'; accepted: " + accepted);
  }
  return problems;
}

LoraStorage PeftCacheConfig::storage() const {
  return static_cast<LoraStorage>(std::ranges::find(kLoraStorageNames, lora_storage) -
                                  kLoraStorageNames.begin());
}

Problems check_lora_storage(LoraStorage storage, const LoraLayout& layout) {
  Problems problems;
  if (storage == LoraStorage::kExact) return problems;
  const std::string text = "lora_storage is '" + std::string(name_of(storage)) + "'; expected '" +
                           std::string(name_of(LoraStorage::kExact)) + "': ";
  if (layout.matrix_layout != MatrixLayout::kPanels) {
    problems.add(text + "CUDA kernels do not decode adapters");
  } else if (storage == LoraStorage::kCompressed && layout.dtype != DType::kBFloat16) {
    problems.add(text + "the engine computes in " + std::string(name_of(layout.dtype)) +
                 ", and only bfloat16 is compressed");
  }
  return problems;
}

LoraCacheSizes resolve_cache_sizes(const PeftCacheConfig& config, const LoraLayout& layout,
                                   std::size_t free_bytes) {
  return resolve_cache_sizes(config, layout, LoraCacheDemand{.free_bytes = free_bytes});
}

LoraCacheSizes resolve_cache_sizes(const PeftCacheConfig& config, const LoraLayout& layout,
                                   const LoraCacheDemand& demand) {
  config.validate().throw_if_any<ConfigError>("PeftCacheConfig");
  if (layout.target_modules.empty()) {
    if (without_hints(config) != PeftCacheConfig{})
      refuse("the engine was built without LoRA, so there is no LoRA cache to configure");
    return {};
  }
  check_lora_storage(config.storage(), layout).throw_if_any<ConfigError>("PeftCacheConfig");
  const Reference ranks = reference_ranks(config, layout);
  const std::size_t page = std::max(device_adapter_bytes(layout, ranks.optimal_rank),
                                    largest_image_bytes(layout, layout.max_rank));
  LoraCacheSizes sizes;
  sizes.page_bytes = page;
  sizes.host_bytes = resolve_host(config, layout, ranks);
  sizes.device_pages = resolve_device_pages(config, layout, ranks, page, demand.free_bytes);
  const auto adapters = static_cast<std::size_t>(demand.max_batch_size);
  const auto share_of = [](std::size_t bytes) {
    return static_cast<std::size_t>(kDefaultShareOfMemory * static_cast<double>(bytes));
  };
  sizes.max_host_bytes = sizes.host_bytes;
  if (!config.host_cache_size && config.num_host_module_layer == 0) {
    const std::size_t wanted = saturating_product(adapters, host_adapter_bytes(layout, layout.max_rank));
    sizes.max_host_bytes = std::max(sizes.host_bytes, std::min(wanted, share_of(demand.free_host_bytes)));
  }
  sizes.max_device_pages = sizes.device_pages;
  if (demand.device_level_grows && !config.device_cache_percent && config.num_device_module_layer == 0) {
    const std::int64_t wanted = device_adapter_pages(layout, layout.max_rank, page) * demand.max_batch_size;
    const auto affordable = static_cast<std::int64_t>(share_of(demand.free_bytes) / page);
    sizes.max_device_pages = std::max(sizes.device_pages, std::min(wanted, affordable));
  }
  return sizes;
}

}  // namespace adaptrt
