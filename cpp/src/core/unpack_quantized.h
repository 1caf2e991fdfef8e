#pragma once

#include <cstdint>

#include "adaptrt/core/panels.h"

namespace adaptrt {

/// unpack_panel_row for a quantised matrix.
void unpack_quantized_row(const PanelMatrix& matrix, std::int64_t row, float* out);

}  // namespace adaptrt
