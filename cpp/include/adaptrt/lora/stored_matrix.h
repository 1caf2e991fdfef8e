#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// A or B of an adapter on the device level, in panels.
struct StoredMatrix {
  const std::byte* data = nullptr;
  LoraStorage storage = LoraStorage::kExact;
  DType dtype = DType::kFloat32;
  std::int64_t n = 0;
  std::int64_t k = 0;

  [[nodiscard]] bool is_compressed() const { return storage == LoraStorage::kCompressed; }

  /// Bytes of the matrix.
  [[nodiscard]] std::size_t bytes() const {
    return is_compressed() ? compressed_matrix_bytes(data, n, k) : adaptrt::panel_bytes(dtype, n, k);
  }
  /// Address of a panel's elements.
  [[nodiscard]] const std::byte* panel(std::int64_t panel) const {
    return data + (is_compressed() ? matrix_panel_offset(k, panel) : panel_offset(dtype, k, panel));
  }
  /// Bytes of a panel's elements.
  [[nodiscard]] std::size_t panel_bytes(std::int64_t panel) const {
    const std::int64_t width = panel_width(n, panel);
    return is_compressed() ? matrix_panel_bytes(width, k) : adaptrt::panel_bytes(dtype, width, k);
  }
};

}  // namespace adaptrt
