#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/panels.h"

namespace adaptrt {

// Int8 matrices: the A and B of adapters as integers, without their scales. A panel of width w is
//
//   int8 [ceil(k / 4) * 2][w][2]      the integers of a kW8A16 panel (core/quantized_panels.h)
//
// with zeros as padding in k. Products read it as a kW8A16 panel with QuantizedGemm::scales.

/// Quantisation of an int8 matrix, for QuantizedGemm.
inline constexpr Quantization kInt8Matrix{.algo = QuantAlgo::kW8A16};
/// k of an int8 matrix is padded to a multiple of this.
inline constexpr std::int64_t kInt8MatrixInputs = 4;

/// Bytes of an int8 W[n, k], or of a panel of n outputs.
[[nodiscard]] constexpr std::size_t int8_matrix_bytes(std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(n * ((k + kInt8MatrixInputs - 1) / kInt8MatrixInputs * kInt8MatrixInputs));
}

/// Byte offset of panel `panel`.
[[nodiscard]] constexpr std::size_t int8_matrix_offset(std::int64_t k, std::int64_t panel) {
  return int8_matrix_bytes(panel * kPanelColumns, k);
}

/// The dimension of W[n, k] along which scales differ.
enum class ScaleAxis : std::uint8_t {
  kOutputs,  ///< a scale for each output, [n]
  kInputs,   ///< a scale for each input, [k]
};

/// Raises each maxima[i] to the largest |W| of output or input i. `panels`: a plain W[n, k] of type `dtype`.
/// NaN counts as 0.
void raise_maxima(const std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, ScaleAxis axis,
                  std::span<float> maxima);

/// The scale of values up to `maximum`: maximum / 127, or 0 below 2^-100, whose quotients could overflow.
[[nodiscard]] constexpr float int8_scale(float maximum) {
  return maximum < 0x1p-100F ? 0.0F : maximum / 127.0F;
}

/// Writes W[n, k] as an int8 matrix to `out`: W / scale in float32, rounded to nearest even and clamped to
/// -127 and 127; 0 where the scale is 0. `panels` is a plain W of type `dtype` and does not overlap `out`.
void round_to_int8(const std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, ScaleAxis axis,
                   std::span<const float> scales, std::byte* out);

/// Writes the integers of row `row` of an int8 W[n, k], [k], to `out`.
void unpack_int8_row(const std::byte* matrix, std::int64_t n, std::int64_t k, std::int64_t row, float* out);

}  // namespace adaptrt
