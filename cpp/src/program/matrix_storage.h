#pragma once

#include <string>
#include <vector>

#include "adaptrt/core/panels.h"

namespace adaptrt {

/// What is wrong with the way in which a program's matrix is stored; each goes on from the matrix's name.
[[nodiscard]] std::vector<std::string> problems_of_storage(const PanelMatrix& matrix);

}  // namespace adaptrt
