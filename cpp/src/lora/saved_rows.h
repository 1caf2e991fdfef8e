#pragma once

#include <cstddef>
#include <span>

#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"
#include "image_writer.h"

namespace adaptrt {

/// True if a row of a linear layer has only A and B, and B is zero. `values`: the row's elements as sent.
[[nodiscard]] bool changes_nothing(const AdapterRow& row, const std::byte* values, DType dtype,
                                   const LoraLayout& layout, const SiteIndex& index);

/// Sets AdapterRow::shares_a of `rows`, which are those of `source`; returns the number of rows for which it
/// is true. Only adapters for panels share A: every process must find the same, because a product's order of
/// sums depends on its number of columns.
std::size_t find_shared_a(std::span<AdapterRow> rows, const SourceRows& source, const LoraLayout& layout,
                          const SiteIndex& index);

}  // namespace adaptrt
