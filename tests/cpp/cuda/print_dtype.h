#pragma once

#include <ostream>

#include "adaptrt/core/dtype.h"

namespace adaptrt {

/// Prints a dtype in the name of a test case.
inline std::ostream& operator<<(std::ostream& out, DType dtype) {
  return out << name_of(dtype);
}

}  // namespace adaptrt
