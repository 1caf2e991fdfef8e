#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/panels.h"
#include "buffers.h"

namespace adaptrt::bindings {

/// Throws ValueError for sizes that no compressed W[n, k] has.
inline void check_compressed_sizes(std::int64_t n, std::int64_t k, std::int64_t outliers) {
  check_matrix_sizes("a compressed matrix", n, k);
  if (!can_be_compressed(n, k)) {
    throw pybind11::value_error("a matrix [" + std::to_string(n) + ", " + std::to_string(k) +
                                "] cannot be compressed; it needs outputs, and a number of inputs that is a "
                                "multiple of " +
                                std::to_string(kPieceInputs));
  }
  if (outliers < 0 || outliers > k * kPanelColumns) {
    throw pybind11::value_error("a compressed panel of " + std::to_string(k * kPanelColumns) +
                                " elements cannot have places for " + std::to_string(outliers) + " outliers");
  }
}

}  // namespace adaptrt::bindings
