#pragma once

#include <cstdint>

#include "adaptrt/lora/layout.h"
#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Returns the last load_position() of the adapters' sites that an op reads; -1 if it reads none.
[[nodiscard]] std::int32_t last_read_position(const Op& op, const LoraLayout& layout);

}  // namespace adaptrt
