#pragma once

#include <cstdint>

namespace adaptrt::cuda {

/// The driver's description of a matrix for the copy engine, as far as map_of() uses it.
struct CUtensorMap {
  const unsigned char* matrix;
  std::int64_t rows;
  std::int64_t columns;
  int box_rows;
};

}  // namespace adaptrt::cuda
