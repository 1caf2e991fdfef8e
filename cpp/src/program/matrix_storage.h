#pragma once

#include <string>
#include <vector>

#include "adaptrt/core/panels.h"

namespace adaptrt {

/// Returns the problems of a matrix's storage in a program; each text continues the matrix's name.
[[nodiscard]] std::vector<std::string> problems_of_storage(const PanelMatrix& matrix);

}  // namespace adaptrt
