#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "adaptrt/lora/device_plan.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"

namespace adaptrt {

/// Indices of the adapter's rows at each site that it changes, in the order of their columns of A.
using RowsOfSites = std::map<std::int32_t, std::vector<std::size_t>>;

[[nodiscard]] RowsOfSites rows_of_sites(std::span<const AdapterRow> rows, const LoraLayout& layout,
                                        const SiteIndex& index);

/// The modules of the rows at one site.
[[nodiscard]] std::vector<ModuleRank> modules_of(std::span<const AdapterRow> rows,
                                                 std::span<const std::size_t> rows_here);

}  // namespace adaptrt
