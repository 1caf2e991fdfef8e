#pragma once

#include <vector>

#include "context.h"
#include "packed_rows.h"

namespace adaptrt {

/// Returns, for each op of a section, the place where it packs its output for the next linear layer. A norm
/// writes plain rows too. An activated layer writes only packed rows, and only if no other op reads its
/// output.
[[nodiscard]] std::vector<PackedPlace> find_packed_places(const std::vector<Op>& ops,
                                                          const CpuContext& context);

}  // namespace adaptrt
