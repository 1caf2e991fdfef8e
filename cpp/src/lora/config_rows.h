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

/// The rows of the weights tensor, as far as they are known.
struct SentWeights {
  std::optional<std::int64_t> columns;
  const std::byte* data = nullptr;  ///< one row per config row; nullptr if unreadable
  DType dtype = DType::kFloat32;
};

/// Returns the rows of `config` that this engine accepts, with offset 0, and adds the problems of all others.
/// `config` is read only once, so that later changes by its owner have no effect.
///
/// TensorRT-LLM's converter writes a fused gate_up_proj as mlp_h_to_4h with twice the outputs, up first. If
/// one of these rows has values in the second half, all mlp_h_to_4h rows become mlp_gate_up.
[[nodiscard]] std::vector<CheckedRow> check_rows(const TensorView& config, MatrixShape shape,
                                                 const SentWeights& weights, const LoraLayout& layout,
                                                 const SiteIndex& index, AdapterProblems& problems);

/// Returns the settings in the rows, for the requests that use the adapter.
[[nodiscard]] AdapterTerms terms_of_rows(std::span<const AdapterRow> rows);

/// The same for a config as sent; nullopt if it is unreadable, or has a row that is refused.
[[nodiscard]] std::optional<AdapterTerms> terms_of_config(const TensorView& config);

}  // namespace adaptrt
