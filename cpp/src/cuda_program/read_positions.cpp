#include "read_positions.h"

#include <algorithm>
#include <variant>

namespace adaptrt {
namespace {

/// Returns the last site of the vocabulary's slices, of a layer's experts or of its heads.
std::int32_t last_of_group(const LoraLayout& layout, std::int32_t first) {
  const auto site = [&](std::int32_t index) -> const LoraSite& {
    return layout.sites[static_cast<std::size_t>(index)];
  };
  const LoraPart& part = site(first).parts[0];
  const auto is_of_group = [&](const LoraSite& other) {
    return other.parts[0].module == part.module &&
           (is_of_vocabulary(part.module) || other.layer == site(first).layer);
  };
  std::int32_t last = first;
  while (last + 1 < static_cast<std::int32_t>(layout.sites.size()) && is_of_group(site(last + 1))) ++last;
  return last;
}

}  // namespace

std::int32_t last_read_position(const Op& op, const LoraLayout& layout) {
  const auto position = [&](std::int32_t site) {
    return site < 0 ? -1 : load_position(layout, last_of_group(layout, site));
  };
  return std::visit(
      [&](const auto& each) {
        if constexpr (requires { each.lora_site; }) return position(each.lora_site);
        if constexpr (requires { each.gate_up_site; }) {
          return std::max(position(each.gate_up_site), position(each.down_site));
        }
        return -1;
      },
      op);
}

}  // namespace adaptrt
