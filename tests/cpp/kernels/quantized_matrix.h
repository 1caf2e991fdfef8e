#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/quantized_panels.h"
#include "kernel_tables.h"

namespace adaptrt {

/// A quantised W[n, k] of random integers and scales, packed.
struct QuantizedMatrix {
  QuantizedMatrix(const Quantization& how, std::int64_t outputs, std::int64_t inputs, FreshRandom* random)
      : quantization(how), n(outputs), k(inputs), panels(panel_bytes(how, DType::kFloat32, outputs, inputs)) {
    const bool is_int4 = how.algo == QuantAlgo::kW4A16;
    const std::int64_t groups = group_count(how, k);
    const std::int64_t row_bytes = is_int4 ? (k + 1) / 2 : k;
    std::vector<std::byte> weights(static_cast<std::size_t>(n * row_bytes));
    for (auto& byte : weights)
      byte = static_cast<std::byte>(static_cast<int>(random->between(0.0F, 255.99F)));
    if (!is_int4) {
      for (auto& byte : weights) byte = byte == std::byte{0x80} ? std::byte{0x81} : byte;
    }
    auto scales = random->vector(n * groups, 0.001F, 0.1F);
    std::vector<std::uint8_t> zeros(static_cast<std::size_t>(n * groups));
    for (auto& zero : zeros) zero = static_cast<std::uint8_t>(random->between(0.0F, 15.99F));
    pack_quantized_panels(panels.data(), how, n, k, 0, n,
                          {weights.data(), scales.data(), how.zero_points ? zeros.data() : nullptr});
  }

  [[nodiscard]] PanelMatrix matrix() const {
    return {panels.data(), DType::kFloat32, n, k, nullptr, quantization};
  }
  /// W[n, k], the values that the integers stand for.
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> result(static_cast<std::size_t>(n * k));
    for (std::int64_t row = 0; row < n; ++row) unpack_panel_row(matrix(), row, result.data() + row * k);
    return result;
  }

  Quantization quantization;
  std::int64_t n;
  std::int64_t k;
  std::vector<std::byte> panels;
};

inline void multiply(const KernelTable& table, const QuantizedGemm& gemm) {
  table.quantized_gemm[static_cast<std::size_t>(gemm.activation)](gemm);
}

}  // namespace adaptrt
