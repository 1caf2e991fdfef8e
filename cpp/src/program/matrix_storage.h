#pragma once

#include <string>
#include <vector>

#include "adaptrt/core/panels.h"

namespace adaptrt {

/// Returns the problems of a matrix's storage in a program; each text continues the matrix's name.
[[nodiscard]] std::vector<std::string> problems_of_storage(const PanelMatrix& matrix);
/// Returns the reasons why a matrix cannot be one of a program whose matrices are row-major.
///
/// A row-major matrix is plain, or has integers of W8A16 or of four bits of W4A16. It is then stored like a
/// single panel of n outputs (core/quantized_panels.h), whose integers are row-major: int8 [n][k], or uint8
/// [n][k / 2] with the even input in the lower half; float32 scale [n][G]; uint8 zero [n][G]. Its sizes are
/// those of panels, because k is a multiple of 8.
[[nodiscard]] std::vector<std::string> problems_of_rows(const PanelMatrix& matrix);

}  // namespace adaptrt
