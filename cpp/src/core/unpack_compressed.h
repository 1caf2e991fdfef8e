#pragma once

#include <cstdint>

#include "adaptrt/core/panels.h"

namespace adaptrt {

/// unpack_panel_row for a row in a compressed panel.
void unpack_compressed_row(const PanelMatrix& matrix, std::int64_t row, float* out);

}  // namespace adaptrt
