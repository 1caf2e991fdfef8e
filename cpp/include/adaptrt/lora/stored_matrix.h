#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/int8_matrix.h"
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

  /// Bytes of the matrix.
  [[nodiscard]] std::size_t bytes() const {
    switch (storage) {
      case LoraStorage::kCompressed:
        return compressed_matrix_bytes(data, n, k);
      case LoraStorage::kInt8:
        return int8_matrix_bytes(n, k);
      case LoraStorage::kExact:
        break;
    }
    return adaptrt::panel_bytes(dtype, n, k);
  }
  /// Address of a panel's elements.
  [[nodiscard]] const std::byte* panel(std::int64_t panel) const { return data + offset(panel); }
  /// Bytes of a panel's elements.
  [[nodiscard]] std::size_t panel_bytes(std::int64_t panel) const {
    const std::int64_t width = panel_width(n, panel);
    switch (storage) {
      case LoraStorage::kCompressed:
        return matrix_panel_bytes(width, k);
      case LoraStorage::kInt8:
        return int8_matrix_bytes(width, k);
      case LoraStorage::kExact:
        break;
    }
    return adaptrt::panel_bytes(dtype, width, k);
  }

 private:
  [[nodiscard]] std::size_t offset(std::int64_t panel) const {
    switch (storage) {
      case LoraStorage::kCompressed:
        return matrix_panel_offset(k, panel);
      case LoraStorage::kInt8:
        return int8_matrix_offset(k, panel);
      case LoraStorage::kExact:
        break;
    }
    return panel_offset(dtype, k, panel);
  }
};

}  // namespace adaptrt
