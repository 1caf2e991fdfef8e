#include "adaptrt/gpu/adapter_entries.h"

#include <algorithm>

#include "adaptrt/lora/modules.h"

namespace adaptrt {

bool is_of_slots(const LoraSite& site) {
  using enum LoraModule;
  return std::ranges::any_of(site.parts, [](const LoraPart& part) {
    return part.module == kMoeHTo4H || part.module == kMoeGate || part.module == kMoe4HToH ||
           part.module == kAttnKvBKey || part.module == kAttnKvBValue;
  });
}

namespace {

/// True if the parts' entries are those of their layer and module, as in the plugins' tables.
bool has_place_in_layer(const LoraSite& site) {
  return !is_of_slots(site) && std::ranges::all_of(site.parts, [](const LoraPart& part) {
    return static_cast<std::int32_t>(part.module) < kNumLoraModules;
  });
}

}  // namespace

AdapterEntries::AdapterEntries(const LoraLayout& layout) : rows_(layout.num_layers) {
  for (const LoraSite& site : layout.sites) {
    if (has_place_in_layer(site)) rows_ = std::max(rows_, site.layer + 1);
  }
  std::int64_t next = count();
  for (const LoraSite& site : layout.sites) {
    auto& entries = entries_.emplace_back();
    for (std::size_t part = 0; part < site.parts.size(); ++part) {
      const auto module = static_cast<std::int64_t>(site.parts[part].module);
      entries.at(part) =
          has_place_in_layer(site) ? std::int64_t{site.layer} * kNumLoraModules + module : next++;
    }
  }
  rows_ = static_cast<std::int32_t>((next + kNumLoraModules - 1) / kNumLoraModules);
}

std::int64_t AdapterEntries::count() const {
  return std::int64_t{rows_} * kNumLoraModules;
}

}  // namespace adaptrt
