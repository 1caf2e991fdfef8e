#include "saved_rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>

#include "adaptrt/core/element_scan.h"
#include "image_sizes.h"

namespace adaptrt {

bool changes_nothing(const AdapterRow& row, const std::byte* values, DType dtype, const LoraLayout& layout,
                     const SiteIndex& index) {
  if (is_setting(row.module) || row.vectors.count() > 0) return false;
  const auto site = static_cast<std::size_t>(index.find(row.layer, row.module)->first_site);
  if (!layout.sites[site].is_of_layer()) return false;
  const auto in_a = static_cast<std::size_t>(row.rank * row.sizes.a_per_rank());
  const auto in_b = static_cast<std::size_t>(row.rank * row.sizes.b_per_rank());
  return !find_not_zero(values + in_a * size_of(dtype), dtype, in_b);
}

std::size_t find_shared_a(std::span<AdapterRow> rows, const SourceRows& source, const LoraLayout& layout,
                          const SiteIndex& index) {
  if (layout.matrix_layout != MatrixLayout::kPanels) return 0;
  const auto position = [&](std::int32_t site, std::size_t row) {
    return module_position(layout.sites[static_cast<std::size_t>(site)], rows[row].module);
  };
  const auto first_site = [&](std::size_t row) {
    return index.find(rows[row].layer, rows[row].module)->first_site;
  };
  std::map<std::int32_t, std::size_t> first_rows;  // by site
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (is_setting(rows[i].module)) continue;
    const std::int32_t site = first_site(i);
    const auto [first, is_new] = first_rows.try_emplace(site, i);
    if (!is_new && position(site, i) < position(site, first->second)) first->second = i;
  }
  std::size_t count = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (is_setting(rows[i].module)) continue;
    const std::size_t first = first_rows.at(first_site(i));
    if (first == i || rows[i].rank != rows[first].rank) continue;
    const auto elements = static_cast<std::size_t>(rows[i].rank * rows[i].sizes.a_per_rank());
    rows[i].shares_a =
        std::memcmp(source.element(i, 0), source.element(first, 0), elements * size_of(source.dtype)) == 0;
    if (rows[i].shares_a) ++count;
  }
  return count;
}

}  // namespace adaptrt
