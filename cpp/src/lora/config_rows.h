#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "adapter_checks.h"
#include "adaptrt/core/dtype.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"

namespace adaptrt {

/// The weights' rows, as far as they are known.
struct SentWeights {
  std::optional<std::int64_t> columns;
  const std::byte* data = nullptr;  ///< as many rows as the config's; nullptr: they cannot be read
  DType dtype = DType::kFloat32;
};

/// The rows of `config` that this engine accepts, offsets left 0; all others are among the problems. `config`
/// is read once: what its owner does to it meanwhile changes nothing that was checked.
///
/// TensorRT-LLM's own converter writes a fused gate_up_proj as mlp_h_to_4h with twice its outputs, of up
/// first. Rows of mlp_h_to_4h become mlp_gate_up where one of them has values there.
[[nodiscard]] std::vector<CheckedRow> check_rows(const TensorView& config, MatrixShape shape,
                                                 const SentWeights& weights, const LoraLayout& layout,
                                                 const SiteIndex& index, AdapterProblems& problems);

/// Settings that rows give to the requests that use their adapter.
[[nodiscard]] AdapterTerms terms_of_rows(std::span<const AdapterRow> rows);

/// The same of a config as it was sent; nullopt when it cannot be read, or has a row that is refused.
[[nodiscard]] std::optional<AdapterTerms> terms_of_config(const TensorView& config);

}  // namespace adaptrt
