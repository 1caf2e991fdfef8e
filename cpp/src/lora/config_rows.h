#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "adapter_checks.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"

namespace adaptrt {

/// The rows of `config` that this engine accepts, offsets left 0; all others are among the problems. `config`
/// is read once: what its owner does to it meanwhile changes nothing that was checked. `width` is that of the
/// weights' rows when it is known.
[[nodiscard]] std::vector<CheckedRow> check_rows(const TensorView& config, MatrixShape shape,
                                                 std::optional<std::int64_t> width, const LoraLayout& layout,
                                                 const SiteIndex& index, AdapterProblems& problems);

/// What rows say of the requests that use their adapter.
[[nodiscard]] AdapterTerms terms_of_rows(std::span<const AdapterRow> rows);

/// The same of a config as it was sent; nullopt when it cannot be read, or has a row that is refused.
[[nodiscard]] std::optional<AdapterTerms> terms_of_config(const TensorView& config);

}  // namespace adaptrt
