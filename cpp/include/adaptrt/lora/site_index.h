#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Sites and sizes of a module in a layer.
struct ModulePlace {
  /// Index into LoraLayout::sites; for experts, the site of the first local expert.
  std::int32_t first_site = 0;
  /// Sizes in the whole layer.
  ModuleSizes sizes;
  /// For experts: number of the first local expert, and the number of local experts. Their sites are
  /// consecutive.
  std::int32_t first_expert = 0;
  std::int32_t num_sites = 1;
};

/// Index from the modules of a layout's layers to their sites.
class SiteIndex {
 public:
  /// Throws EngineError for contradictory sites: two sites of one module; experts that are out of order,
  /// differ in size or exceed the layer's number; a target module that no layer has.
  explicit SiteIndex(const LoraLayout& layout);

  /// Returns nullptr for a module that the layer does not have; layers may differ. A fused module is found
  /// only if all of its parts are at one site.
  [[nodiscard]] const ModulePlace* find(std::int32_t layer, LoraModule module) const;

 private:
  std::map<std::pair<std::int32_t, LoraModule>, ModulePlace> places_;
};

}  // namespace adaptrt
