#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/quantized_panels.h"
#include "kernel_tables.h"
#include "random_weights.h"

namespace adaptrt {

/// A packed quantised W[n, k] of random integers and scales.
struct QuantizedMatrix {
  QuantizedMatrix(const Quantization& how, std::int64_t outputs, std::int64_t inputs, FreshRandom* random)
      : quantization(how), n(outputs), k(inputs) {
    const std::int64_t groups = group_count(how, k);
    const std::int64_t row_bytes = has_few_bits(how.algo) ? (k + 1) / 2 : k;
    weights.resize(static_cast<std::size_t>(n * row_bytes));
    for (auto& byte : weights) {
      byte =
          testing::weight_byte(how, static_cast<std::byte>(static_cast<int>(random->between(0.0F, 255.99F))));
    }
    scales = random->vector(n * groups, 0.001F, 0.1F);
    zeros.resize(static_cast<std::size_t>(n * groups));
    const float end = has_few_bits(how.algo) ? 15.99F : 255.99F;
    for (auto& zero : zeros) zero = static_cast<std::uint8_t>(random->between(0.0F, end));
    minimums = random->vector(n * groups, -1.0F, 1.0F);
    pack();
  }

  /// Packs the other members into `panels`.
  void pack() {
    panels.assign(panel_bytes(quantization, DType::kFloat32, n, k), std::byte{0xab});
    pack_quantized_panels(panels.data(), quantization, n, k, 0, n,
                          {weights.data(), scales.data(), quantization.zero_points ? zeros.data() : nullptr,
                           quantization.minimums ? minimums.data() : nullptr});
  }

  [[nodiscard]] PanelMatrix matrix() const {
    return {panels.data(), DType::kFloat32, n, k, nullptr, quantization};
  }
  /// Returns W[n, k], the dequantised values.
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> result(static_cast<std::size_t>(n * k));
    for (std::int64_t row = 0; row < n; ++row) unpack_panel_row(matrix(), row, result.data() + row * k);
    return result;
  }

  Quantization quantization;
  std::int64_t n;
  std::int64_t k;
  std::vector<std::byte> weights;
  std::vector<float> scales;
  std::vector<std::uint8_t> zeros;
  std::vector<float> minimums;
  std::vector<std::byte> panels;
};

inline void multiply(const KernelTable& table, const QuantizedGemm& gemm) {
  table.quantized_gemm[static_cast<std::size_t>(gemm.activation)](gemm);
}

}  // namespace adaptrt
