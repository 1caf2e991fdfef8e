#pragma once

#include <vector>

#include "context.h"
#include "packed_rows.h"

namespace adaptrt {

/// Where each op of a section packs its output for the linear layer that comes next, by op: a norm in
/// addition to its rows; an activated layer instead of them, where nothing else reads them.
[[nodiscard]] std::vector<PackedPlace> find_packed_places(const std::vector<Op>& ops,
                                                          const CpuContext& context);

}  // namespace adaptrt
