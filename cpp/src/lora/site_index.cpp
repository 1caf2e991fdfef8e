#include "adaptrt/lora/site_index.h"

#include <algorithm>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

using Places = std::map<std::pair<std::int32_t, LoraModule>, ModulePlace>;

std::string describe(std::int32_t layer, LoraModule module) {
  return std::string(info_of(module).name) + " of layer " + std::to_string(layer);
}

/// Adds the parts of site `index` to `places`, and their problems to `problems`.
void add_parts(const LoraSite& site, std::int32_t index, Places* places, Problems* problems) {
  for (const LoraPart& part : site.parts) {
    const std::string name = describe(site.layer, part.module);
    if (parts_of(part.module).size() != 1) {
      problems->add("LoRA site " + std::to_string(index) + " has the fused module " + name + " for a part");
      continue;
    }
    const ModuleSizes sizes{site.whole_in_size(), part.whole_out_size(), site.experts_for_each};
    const auto [found, is_new] = places->try_emplace({site.layer, part.module},
                                                     ModulePlace{index, sizes, site.expert, /*num_sites=*/1});
    if (is_new) {
      if (site.experts_for_each < 1) problems->add(name + " is of no expert");
      if (site.experts_for_each == 1 && site.expert != 0) {
        problems->add("the first LoRA site of " + name + " is not expert 0's");
      }
      continue;
    }
    ModulePlace& place = found->second;
    if (site.expert == place.first_expert) {
      problems->add("two LoRA sites have " + name);
    } else if (site.expert != place.first_expert + place.num_sites ||
               index != place.first_site + place.num_sites ||
               site.experts_for_each * place.num_sites != place.sizes.experts) {
      problems->add("the LoRA sites of the experts' " + name + " are not in order");
    } else if (sizes.in != place.sizes.in || sizes.out != place.sizes.out) {
      problems->add("experts' " + name + " have different sizes");
    } else {
      ++place.num_sites;
      place.sizes.experts += site.experts_for_each;
    }
  }
}

/// Reports experts that a layer does not have, whose parts of an adapter's rows would be read.
void check_experts(const Places& places, Problems* problems) {
  for (const auto& [key, place] : places) {
    if (place.first_expert < 0 || place.first_expert + place.num_sites > place.sizes.experts) {
      problems->add("the LoRA sites of " + describe(key.first, key.second) + " are of experts " +
                    std::to_string(place.first_expert) + " to " +
                    std::to_string(place.first_expert + place.num_sites - 1) + " of " +
                    std::to_string(place.sizes.experts));
    }
  }
}

/// Adds the fused modules whose parts are all at one site.
void add_fused(const LoraLayout& layout, Places* places) {
  for (const LoraModuleInfo& info : lora_modules()) {
    const auto parts = parts_of(info.module);
    if (parts.size() == 1) continue;
    for (std::int32_t layer = 0; layer < layout.num_layers; ++layer) {
      const auto first = places->find({layer, parts.front()});
      if (first == places->end()) continue;
      ModulePlace place = first->second;
      place.sizes.out = 0;
      const bool together = std::ranges::all_of(parts, [&](LoraModule part) {
        const auto found = places->find({layer, part});
        if (found == places->end() || found->second.first_site != place.first_site) return false;
        place.sizes.out += found->second.sizes.out;
        return true;
      });
      if (together) places->emplace(std::pair{layer, info.module}, place);
    }
  }
}

}  // namespace

SiteIndex::SiteIndex(const LoraLayout& layout) {
  Problems problems;
  for (std::size_t i = 0; i < layout.sites.size(); ++i) {
    const LoraSite& site = layout.sites[i];
    if (site.parts.empty() || site.parts.size() > kMaxPartsPerSite) {
      problems.add("LoRA site " + std::to_string(i) + " has " + std::to_string(site.parts.size()) +
                   " parts; accepted: 1 to " + std::to_string(kMaxPartsPerSite));
    }
    add_parts(site, static_cast<std::int32_t>(i), &places_, &problems);
  }
  check_experts(places_, &problems);
  add_fused(layout, &places_);
  for (const LoraModule module : layout.target_modules) {
    bool found = false;
    for (std::int32_t layer = 0; layer < layout.num_layers && !found; ++layer) {
      found = places_.contains({layer, module});
    }
    if (!found) problems.add("no LoRA site has " + std::string(info_of(module).name));
  }
  problems.throw_if_any<EngineError>("the engine's LoRA layout is inconsistent");
}

const ModulePlace* SiteIndex::find(std::int32_t layer, LoraModule module) const {
  const auto found = places_.find({layer, module});
  return found == places_.end() ? nullptr : &found->second;
}

}  // namespace adaptrt
