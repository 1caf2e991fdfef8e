#include "adapter_bounds.h"

#include <algorithm>
#include <numeric>
#include <ranges>
#include <vector>

#include "adaptrt/lora/device_plan.h"

namespace adaptrt {
namespace {

using Modules = std::vector<ModuleRank>;

/// Returns the number of outputs at the site of a module or of its parts.
std::int64_t outputs_of(const LoraSite& site, LoraModule module) {
  std::int64_t outputs = 0;
  for (const LoraModule part : parts_of(module)) {
    outputs += std::ranges::find(site.parts, part, &LoraPart::module)->whole_out_size();
  }
  return outputs;
}

/// Returns the maximal sets of modules that an adapter can have at a site: its enabled parts, or an enabled
/// fused module.
std::vector<Modules> choices_at(const LoraLayout& layout, const LoraSite& site, std::int32_t rank,
                                bool shifts = false) {
  const auto has_part = [&](LoraModule part) {
    return std::ranges::find(site.parts, part, &LoraPart::module) != site.parts.end();
  };
  std::vector<Modules> choices(1);
  for (const LoraModule module : layout.target_modules) {
    if (!std::ranges::all_of(parts_of(module), has_part)) continue;
    const ModuleRank entry{module, rank, {layout.dora_enabled, shifts && layout.shifts_enabled}};
    if (parts_of(module).size() == 1) {
      choices.front().push_back(entry);
    } else {
      choices.push_back({entry});
    }
  }
  return choices;
}

/// Returns the linear layers of decoder layers.
auto sites_of_layers(const LoraLayout& layout) {
  return layout.sites | std::views::filter(&LoraSite::is_of_layer);
}

std::size_t largest_image_at(const LoraLayout& layout, const LoraSite& site, std::int32_t rank,
                             bool shifts = false) {
  std::size_t largest = 0;
  if (site.is_new_tokens()) {
    const ModuleRank all{LoraModule::kNewTokens, layout.max_extra_tokens, {}};
    return image_bytes(layout, site, {&all, 1});
  }
  if (site.is_norm()) {
    const ModuleRank shift{LoraModule::kNorm, 1, {.shift = true}};
    return image_bytes(layout, site, {&shift, 1});
  }
  for (const Modules& modules : choices_at(layout, site, rank, shifts)) {
    largest = std::max(largest, image_bytes(layout, site, modules));
  }
  return largest;
}

/// Returns the size of the largest image at each site of decoder layers that an adapter of this rank can
/// change.
std::vector<std::size_t> image_sizes(const LoraLayout& layout, std::int32_t rank) {
  std::vector<std::size_t> sizes;
  for (const LoraSite& site : sites_of_layers(layout)) {
    const std::size_t largest = largest_image_at(layout, site, rank);
    if (largest > 0) sizes.push_back(largest);
  }
  return sizes;
}

}  // namespace

std::size_t largest_image_bytes(const LoraLayout& layout, std::int32_t rank) {
  std::size_t largest = 0;
  for (const LoraSite& site : layout.sites) {
    largest = std::max(largest, largest_image_at(layout, site, rank, /*shifts=*/true));
  }
  return largest;
}

std::size_t device_adapter_bytes(const LoraLayout& layout, std::int32_t rank) {
  const auto sizes = image_sizes(layout, rank);
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

std::int64_t device_adapter_pages(const LoraLayout& layout, std::int32_t rank, std::size_t page_bytes) {
  return std::ssize(place_images(image_sizes(layout, rank), page_bytes).used_bytes);
}

std::size_t host_adapter_bytes(const LoraLayout& layout, std::int32_t rank) {
  if (layout.is_whole()) return device_adapter_bytes(layout, rank);
  std::size_t elements = 0;
  for (const LoraSite& site : sites_of_layers(layout)) {
    std::size_t largest = 0;
    for (const Modules& modules : choices_at(layout, site, rank)) {
      std::size_t sum = 0;
      for (const ModuleRank& module : modules) {
        const std::int64_t out = outputs_of(site, module.module);
        sum += static_cast<std::size_t>(rank * (site.whole_in_size() + out) + module.vectors.count() * out);
      }
      largest = std::max(largest, sum);
    }
    elements += largest * static_cast<std::size_t>(site.experts_for_each);
  }
  return elements * size_of(layout.dtype);
}

std::size_t widest_module_bytes(const LoraLayout& layout) {
  std::int64_t widest = 0;
  for (const LoraSite& site : sites_of_layers(layout)) {
    for (const Modules& modules : choices_at(layout, site, 1)) {
      for (const ModuleRank& module : modules) {
        widest = std::max(widest, site.whole_in_size() + outputs_of(site, module.module));
      }
    }
  }
  return static_cast<std::size_t>(widest) * size_of(layout.dtype);
}

}  // namespace adaptrt
