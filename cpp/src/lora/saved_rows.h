#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"

namespace adaptrt {

/// True if a row of a linear layer has only A and B, and B is zero. `values`: the row's elements as sent.
[[nodiscard]] bool changes_nothing(const AdapterRow& row, const std::byte* values, DType dtype,
                                   const LoraLayout& layout, const SiteIndex& index);

/// Sets AdapterRow::shares_a; returns the number of rows for which it is true. `a_of` returns the bytes of a
/// row's A.
std::size_t find_shared_a(std::span<AdapterRow> rows, const LoraLayout& layout, const SiteIndex& index,
                          const std::function<std::span<const std::byte>(std::size_t row)>& a_of);

}  // namespace adaptrt
