#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/panels.h"

namespace adaptrt {

// Quantised matrices use the panels of core/panels.h; each panel is followed by its scales and other data. w
// is the panel's width, G the number of groups:
//
//   kW8A16  int8 [ceil(k / 4) * 2][w][2], float32 scale [w]                  value = scale * q
//   with groups                          scale [G][w] of scale_type              value = scale * q
//   with zero points, uint8 zero [G][w]                         value = scale * (q + 128 - zero)
//   with minimums, minimum [G][w] of scale_type                   value = scale * q - minimum
//   kE4M3   bytes like kW8A16, scale [G][w]   value = scale * number, rounded to value_type
//   kLLMInt8  like kW8A16, float32 scale [w]   value = q * scale * kLLMInt8Factor, rounded to value_type
//   kW8A8   int8 [ceil(k / 4)][w][4], float32 scale [w], int32 [w]           value = scale * q
//   kW4A16  uint32 [ceil(k / 8)][w], scale [G][w], uint8 zero [G][w]        value = scale * (u - zero)
//   with minimums instead of zeros, minimum [G][w] of scale_type   value = scale * u - minimum
//   with a codebook: no zeros                        value = scale * table[u], rounded to value_type
//   kW4A16 of 2 bits  uint32 [k / 16][w], then as above               value = scale * (u - zero)
//   kW4A16 of 3 bits  uint32 [k / 32][3][w], then as above            value = scale * (u - zero)
//   kW4A8   integers like kW4A16
//
// If the inputs are permuted, the permutation int32 [k] follows all panels, aligned to 4 bytes. Scales have
// the type Quantization::scale_type if has_typed_scales() is true.
//
// The int32 of kW8A8 are 128 times the sum of an output's q, because its activations are multiplied as
// unsigned numbers, 128 above their value. A uint32 holds the u of eight inputs: input i is at bits 4 * (i /
// 2) + 16 * (i % 2). So each half has every second input, the order in which pairs of bfloat16 are
// multiplied. Without zero points there is no `zero`; its value is then 2^(bits - 1). Padding in k is q = 0
// and u = 8. Matrices with a codebook have only whole groups, matrices of 2 and 3 bits only whole words.
//
// With 2 bits, a uint32 holds sixteen inputs: input i is at bits 2 * (i / 2) + 16 * (i % 2). With 3 bits,
// three uint32 hold 32 inputs. Input i of a pair i / 2 < 15 is in uint32 number (i / 2) / 5, at bits 3 * (i /
// 2 % 5) + 16 * (i % 2). The highest bit of each half remains: in uint32 number b it is bit b of the last
// pair's inputs.

/// Number of four-bit inputs in a word; group sizes are multiples of it.
inline constexpr std::int64_t kInt4Inputs = 8;
/// Number of inputs whose bits are packed together, for 2, 3 and 4 bits.
[[nodiscard]] constexpr std::int64_t packed_inputs(std::int32_t bits) {
  return bits == 2 ? 16 : bits == 3 ? 32 : kInt4Inputs;
}
/// True if the scales have a type (scale_type) and groups. Otherwise each output has one float32 scale.
[[nodiscard]] constexpr bool has_typed_scales(const Quantization& quantization) {
  return has_few_bits(quantization.algo) || quantization.is_codebook() || quantization.group_size != 0;
}
/// Zero point of four-bit integers that have no stored zero points.
inline constexpr int kInt4Zero = 8;
/// Value that is subtracted from zero points before they are multiplied with sums of activations. Unpacked
/// weights are lower than their stored values by the same amount.
[[nodiscard]] constexpr int middle_of_zeros(QuantAlgo algo) {
  return has_few_bits(algo) ? kInt4Zero : 128;
}
/// Value that decoders subtract from the integers of matrices with minimums. The products add it again.
[[nodiscard]] constexpr int middle_of_minimums(const Quantization& quantization) {
  return has_few_bits(quantization.algo) ? 1 << (quantization.bits - 1) : 0;
}
/// Returns the codebook: the 16 float32 numbers of a code. kNF4 and kFP4 have the numbers of
/// bitsandbytes. For kNF4 they are the quantiles of a normal distribution that QLoRA's authors chose. For
/// kFP4 they have a sign, two exponent bits and one mantissa bit, and are divided by 12. kE2M1 has the
/// four-bit floating-point numbers of the OCP MX formats. For other codes entry u is u - 8.
[[nodiscard]] const std::array<float, 16>& code_table(WeightCode code);
/// Maximum number of inputs of a product with int8 activations: its sum must fit in 32 bits.
inline constexpr std::int64_t kMaxInt8Inputs = 65536;

/// Two pairs of inputs, from inputs that are packed together, that kW4A8 multiplies at the same time. Each
/// half of a word has one input of each pair; `low` moves it to the lower byte and `high` to the upper one.
struct InputPairs {
  int low;
  int high;
};
[[nodiscard]] constexpr InputPairs pairs_of_quad(std::int32_t bits, int quad) {
  constexpr InputPairs kThreeBits[] = {{0, 1}, {2, 3}, {5, 6}, {7, 8}, {10, 11}, {12, 13}, {4, 9}, {14, 15}};
  if (bits == 3) return kThreeBits[quad];
  return {quad, quad + static_cast<int>(packed_inputs(bits)) / 4};
}

/// Number of inputs in the order that int8_order() returns.
inline constexpr std::int64_t kOrderedInputs = 32;
/// Order in which kW4A8 takes kOrderedInputs inputs: quad by quad, in the byte order of a word.
[[nodiscard]] constexpr std::array<std::uint8_t, kOrderedInputs> int8_order(std::int32_t bits) {
  std::array<std::uint8_t, kOrderedInputs> order{};
  const int inputs = static_cast<int>(packed_inputs(bits));
  for (int at = 0; at < static_cast<int>(order.size()); at += 4) {
    const auto [low, high] = pairs_of_quad(bits, at % inputs / 4);
    const int first = at / inputs * inputs;
    const int quad[] = {2 * low, 2 * high, 2 * low + 1, 2 * high + 1};
    for (int i = 0; i < 4; ++i)
      order[static_cast<std::size_t>(at + i)] = static_cast<std::uint8_t>(first + quad[i]);
  }
  return order;
}

/// Number of groups of inputs that have a scale of their own.
[[nodiscard]] constexpr std::int64_t group_count(const Quantization& quantization, std::int64_t k) {
  if (quantization.group_size == 0) return 1;
  return (k + quantization.group_size - 1) / quantization.group_size;
}

/// Addresses of the parts of a quantised panel.
struct QuantizedPanel {
  const std::byte* weights = nullptr;
  const std::byte* scales = nullptr;  ///< float32 [w], or [G][w] of scale_type
  const std::byte* extra = nullptr;   ///< int32 [w] for kW8A8, uint8 zero [G][w], or minimum [G][w]
};

/// Returns the parts of the panel of `width` outputs that begins at `panel`.
[[nodiscard]] QuantizedPanel parts_of_panel(const Quantization& quantization, const std::byte* panel,
                                            std::int64_t k, std::int64_t width);

/// Quantised rows of a matrix, in the layout of checkpoints.
struct QuantizedRows {
  /// 8 bits: int8 [rows, k], 128 below u if there are zero points. Few bits: uint8 [rows, ceil(k / 2)], with
  /// the even input in the lower half of a byte. A half is u if there are zero points, minimums or a
  /// codebook, otherwise u - 2^(bits - 1) as a four-bit two's complement number.
  const std::byte* weights = nullptr;
  const float* scales = nullptr;        ///< [rows, G]; rounded to scale_type if the matrix has typed scales
  const std::uint8_t* zeros = nullptr;  ///< [rows, G], 0 to 15, or to 255 for kW8A16; nullptr if there are
                                        ///< none
  const float* minimums = nullptr;      ///< [rows, G]; rounded to scale_type. nullptr if there are none
};

/// Packs rows [first_row, first_row + rows) of W[n, k] into `panels` (panel_bytes(quantization, n, k) bytes).
/// Packing all rows, in any number of calls, writes every byte. Throws CheckpointError for integers that do
/// not fit in 2 or 3 bits.
void pack_quantized_panels(std::byte* panels, const Quantization& quantization, std::int64_t n,
                           std::int64_t k, std::int64_t first_row, std::int64_t rows,
                           const QuantizedRows& source);

/// Writes the input permutation `order` [k] of an act-order matrix after its panels. `behind` is the end of
/// the panels; padding up to a multiple of 4 bytes is written first.
void pack_permutation(std::byte* behind, const Quantization& quantization, std::int64_t n, std::int64_t k,
                      const std::int32_t* order);

/// Undoes the input permutation of an act-order matrix in place: `values` [k] is in the order of the panels
/// before the call, and in the order of W after it.
void put_in_order(std::span<const std::int32_t> order, float* values);

}  // namespace adaptrt
