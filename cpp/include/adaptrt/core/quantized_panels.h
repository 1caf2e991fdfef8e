#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/panels.h"

namespace adaptrt {

// Quantised matrices lie in the panels of core/panels.h, each panel with what belongs to it. w is the panel's
// width, G the number of groups:
//
//   kW8A16  int8 [ceil(k / 4) * 2][w][2], float32 scale [w]                  value = scale * q
//   kW8A8   int8 [ceil(k / 4)][w][4], float32 scale [w], int32 [w]           value = scale * q
//   kW4A16  uint32 [ceil(k / 8)][w], scale [G][w], uint8 zero [G][w]        value = scale * (u - zero)
//   the same with a code: no zeros                   value = scale * table[u], rounded to value_type
//
// Scales of kW4A16 are of Quantization::scale_type.
// The int32 are 128 times the sum of an output's q: activations of kW8A8 are multiplied as unsigned numbers,
// 128 above their value. A uint32 holds the u of eight inputs, input i of them at bits 4 * (i / 2) + 16 * (i
// % 2): each of its halves has every second input, the order in which pairs of bfloat16 are multiplied.
// Without zero points `zero` is left out and stands for 8. Padding in k is q = 0 and u = 8; matrices with a
// code have whole groups.

/// Inputs that a packed word of kW4A16 holds; group sizes are multiples of it.
inline constexpr std::int64_t kInt4Inputs = 8;
/// The zero point of kW4A16 without zero points.
inline constexpr int kInt4Zero = 8;
/// The 16 numbers that a code stands for, those of bitsandbytes in float32: of kNF4 the quantiles of a normal
/// distribution that QLoRA's authors chose, of kFP4 numbers of a sign, two bits of exponent and one of
/// mantissa over 12; of kE2M1 the four-bit floating point numbers of the OCP's MX formats. Of kInteger u - 8.
[[nodiscard]] const std::array<float, 16>& code_table(FourBitCode code);
/// The most inputs of kW8A8: its sums of products must fit in 32 bits.
inline constexpr std::int64_t kMaxW8A8Inputs = 65536;

/// Number of groups of inputs that have a scale of their own.
[[nodiscard]] constexpr std::int64_t group_count(const Quantization& quantization, std::int64_t k) {
  if (quantization.group_size == 0) return 1;
  return (k + quantization.group_size - 1) / quantization.group_size;
}

/// Where the parts of a quantised panel are.
struct QuantizedPanel {
  const std::byte* weights = nullptr;
  const std::byte* scales = nullptr;  ///< float32 [w], or of kW4A16 [G][w]
  const std::byte* extra = nullptr;   ///< int32 [w] of kW8A8, uint8 zero [G][w] of kW4A16 with zero points
};

/// The parts of the panel of `width` outputs that begins at `panel`.
[[nodiscard]] QuantizedPanel parts_of_panel(const Quantization& quantization, const std::byte* panel,
                                            std::int64_t k, std::int64_t width);

/// Quantised rows of a matrix, as checkpoints have them.
struct QuantizedRows {
  /// int8 [rows, k]; of kW4A16 uint8 [rows, ceil(k / 2)], the lower half of a byte being the even input: u
  /// with zero points or a code, otherwise u - 8 as four bits of two's complement.
  const std::byte* weights = nullptr;
  const float* scales = nullptr;        ///< [rows, G]; of kW4A16 rounded to scale_type
  const std::uint8_t* zeros = nullptr;  ///< [rows, G], 0 to 15; nullptr without zero points
};

/// Packs rows [first_row, first_row + rows) of W[n, k] into `panels` (panel_bytes(quantization, n, k) bytes).
/// Packing all rows, in any number of calls, writes every byte.
void pack_quantized_panels(std::byte* panels, const Quantization& quantization, std::int64_t n,
                           std::int64_t k, std::int64_t first_row, std::int64_t rows,
                           const QuantizedRows& source);

}  // namespace adaptrt
