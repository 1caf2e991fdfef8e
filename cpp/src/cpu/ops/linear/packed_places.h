#pragma once

#include <vector>

#include "context.h"
#include "packed_rows.h"

namespace adaptrt {

/// Returns, for each op of a section, the place where it packs its output for the linear layer that comes
/// next. A norm packs in addition to its plain rows. An activated layer packs instead of them, and only if no
/// other op reads them.
[[nodiscard]] std::vector<PackedPlace> find_packed_places(const std::vector<Op>& ops,
                                                          const CpuContext& context);

}  // namespace adaptrt
