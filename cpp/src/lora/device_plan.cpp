#include "adaptrt/lora/device_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "adaptrt/lora/host_adapter.h"
#include "image_sizes.h"
#include "rows_of_sites.h"

namespace adaptrt {
std::size_t image_bytes(const LoraLayout& layout, const LoraSite& site, std::span<const ModuleRank> modules) {
  const auto exact = [&](std::int64_t n, std::int64_t k) {
    return aligned_bytes(matrix_bytes(layout, n, k));
  };
  return image_bytes(
      site, modules, [&](std::int64_t, std::int64_t n, std::int64_t k) { return exact(n, k); },
      [&](std::size_t, std::size_t, std::int64_t n, std::int64_t k) { return exact(n, k); });
}

ImagePlaces place_images(std::span<const std::size_t> sizes, std::size_t page_bytes) {
  ImagePlaces result;
  std::vector<std::size_t>& used = result.used_bytes;
  for (const std::size_t size : sizes) {
    const auto page =
        std::ranges::find_if(used, [&](std::size_t bytes) { return page_bytes - bytes >= size; });
    const auto number = static_cast<std::int64_t>(page - used.begin());
    if (page == used.end()) {
      used.push_back(size);
      result.places.push_back({number, 0});
    } else {
      result.places.push_back({number, *page});
      *page += size;
    }
  }
  return result;
}

std::size_t DevicePlan::bytes() const {
  return std::accumulate(used_bytes.begin(), used_bytes.end(), std::size_t{0});
}

RowsOfSites rows_of_sites(std::span<const AdapterRow> rows, const LoraLayout& layout,
                          const SiteIndex& index) {
  RowsOfSites rows_at;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (is_setting(rows[i].module)) continue;
    const ModulePlace& place = *index.find(rows[i].layer, rows[i].module);
    for (std::int32_t site = 0; site < place.num_sites; ++site) rows_at[place.first_site + site].push_back(i);
  }
  for (auto& [site_id, rows_here] : rows_at) {
    const LoraSite& site = layout.sites[static_cast<std::size_t>(site_id)];
    std::ranges::sort(rows_here, {}, [&](std::size_t i) { return module_position(site, rows[i].module); });
  }
  return rows_at;
}

std::vector<ModuleRank> modules_of(std::span<const AdapterRow> rows, std::span<const std::size_t> rows_here) {
  std::vector<ModuleRank> modules;
  for (const std::size_t i : rows_here) {
    modules.push_back({rows[i].module, rows[i].rank, rows[i].vectors, rows[i].shares_a});
  }
  return modules;
}

DevicePlan plan_device_images(std::span<const AdapterRow> rows, const LoraLayout& layout,
                              const SiteIndex& index, std::size_t page_bytes,
                              std::span<const std::uint64_t> sizes) {
  DevicePlan plan;
  std::vector<std::vector<std::size_t>> of_stages(static_cast<std::size_t>(layout.num_stages));
  std::size_t number = 0;
  for (auto& [site_id, rows_here] : rows_of_sites(rows, layout, index)) {
    const LoraSite& site = layout.sites[static_cast<std::size_t>(site_id)];
    const std::int32_t stage = layout.stage_of(site);
    of_stages[static_cast<std::size_t>(stage)].push_back(
        sizes.empty() ? image_bytes(layout, site, modules_of(rows, rows_here)) : sizes[number]);
    ++number;
    if (stage == layout.stage) plan.sites.push_back({site_id, rows_here, {}});
  }
  for (const auto& of_stage : of_stages) {
    plan.pages = std::max(plan.pages, std::ssize(place_images(of_stage, page_bytes).used_bytes));
  }
  ImagePlaces own = place_images(of_stages[static_cast<std::size_t>(layout.stage)], page_bytes);
  for (std::size_t i = 0; i < plan.sites.size(); ++i) plan.sites[i].place = own.places[i];
  plan.used_bytes = std::move(own.used_bytes);
  return plan;
}

}  // namespace adaptrt
