#include "adaptrt/core/quantized_panels.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "unpack_quantized.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kInt8Inputs = 4;  // int8 panels are padded in k to a multiple of this

std::int64_t groups_of(std::int64_t k, std::int64_t inputs) {
  return (k + inputs - 1) / inputs;
}

/// Bytes of the weights of one output.
std::int64_t weight_bytes(const Quantization& quantization, std::int64_t k) {
  if (has_few_bits(quantization.algo)) {
    const std::int64_t inputs = packed_inputs(quantization.bits);
    return groups_of(k, inputs) * inputs * quantization.bits / 8;
  }
  return groups_of(k, kInt8Inputs) * kInt8Inputs;
}

std::int64_t scale_bytes(const Quantization& quantization, std::int64_t k) {
  if (!has_typed_scales(quantization)) return 4;
  return static_cast<std::int64_t>(size_of(quantization.scale_type)) * group_count(quantization, k);
}

std::int64_t extra_bytes(const Quantization& quantization, std::int64_t k) {
  if (quantization.algo == QuantAlgo::kW8A8) return 4;
  if (quantization.minimums) return scale_bytes(quantization, k);
  return quantization.zero_points ? group_count(quantization, k) : 0;
}

std::int64_t output_bytes(const Quantization& quantization, std::int64_t k) {
  return weight_bytes(quantization, k) + scale_bytes(quantization, k) + extra_bytes(quantization, k);
}

/// Byte offset of an input's int8 within a panel's weights.
std::int64_t int8_offset(QuantAlgo algo, std::int64_t width, std::int64_t column, std::int64_t input) {
  const std::int64_t interleave = algo == QuantAlgo::kW8A8 ? 4 : 2;
  return (input / interleave * width + column) * interleave + input % interleave;
}

std::int64_t int4_shift(std::int64_t input) {
  const std::int64_t within = input % kInt4Inputs;
  return 4 * (within / 2) + 16 * (within % 2);
}

/// True if rows of a checkpoint hold integers of few bits in two's complement.
bool is_signed(const Quantization& quantization) {
  return !quantization.zero_points && !quantization.minimums && !quantization.is_codebook();
}

/// One output of a panel.
struct Place {
  std::int64_t width;
  std::int64_t column;
};

void pack_int8_row(std::byte* weights, const Quantization& quantization, Place place, std::int64_t k,
                   const std::byte* source, std::byte* extra) {
  const std::int64_t padded = weight_bytes(quantization, k);
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < padded; ++i) {
    const std::byte value = i < k ? source[i] : std::byte{0};
    weights[int8_offset(quantization.algo, place.width, place.column, i)] = value;
    sum += static_cast<std::int8_t>(value);
  }
  if (quantization.algo != QuantAlgo::kW8A8) return;
  sum *= 128;
  std::memcpy(extra + place.column * 4, &sum, sizeof(sum));
}

void pack_int4_row(std::byte* weights, const Quantization& quantization, Place place, std::int64_t k,
                   const std::byte* source) {
  for (std::int64_t word = 0; word < groups_of(k, kInt4Inputs); ++word) {
    std::uint32_t bits = 0;
    for (std::int64_t i = word * kInt4Inputs; i < (word + 1) * kInt4Inputs; ++i) {
      std::uint32_t value = kInt4Zero;
      if (i < k) {
        const auto pair = static_cast<std::uint32_t>(source[i / 2]);
        value = (i % 2 == 0 ? pair : pair >> 4) & 15U;
        if (is_signed(quantization)) value ^= 8U;
      }
      bits |= value << static_cast<unsigned>(int4_shift(i));
    }
    std::memcpy(weights + (word * place.width + place.column) * 4, &bits, sizeof(bits));
  }
}

std::uint32_t int4_value(const std::byte* weights, Place place, std::int64_t input) {
  std::uint32_t word = 0;
  std::memcpy(&word, weights + (input / kInt4Inputs * place.width + place.column) * 4, sizeof(word));
  return (word >> static_cast<unsigned>(int4_shift(input))) & 15U;
}

/// Location of a 2- or 3-bit input: bits in words that are `line` words apart.
class NarrowInput {
 public:
  NarrowInput(std::int32_t bits, std::int64_t input)
      : bits_(bits), pair_(input % packed_inputs(bits) / 2), half_(16 * (input % 2)) {}

  /// Calls visit(word number, shift in the word, shift in the value, number of bits) for each run of bits.
  template <class Visit>
  void for_each_run(const Visit& visit) const {
    constexpr std::int64_t kWordPairs = 5;
    constexpr std::int64_t kHighest = 15;
    if (bits_ == 2) {
      visit(0, 2 * pair_ + half_, 0, 2);
    } else if (pair_ < 3 * kWordPairs) {
      visit(pair_ / kWordPairs, 3 * (pair_ % kWordPairs) + half_, 0, 3);
    } else {
      for (std::int64_t word = 0; word < 3; ++word) visit(word, kHighest + half_, word, 1);
    }
  }

 private:
  std::int64_t bits_;
  std::int64_t pair_;
  std::int64_t half_;
};

/// Number of words that hold one output's packed_inputs(bits) inputs: [words_of_inputs(bits)][w].
std::int64_t words_of_inputs(std::int32_t bits) {
  return bits == 3 ? 3 : 1;
}

std::uint32_t narrow_value(const std::byte* weights, std::int32_t bits, Place place, std::int64_t input) {
  const std::int64_t first = input / packed_inputs(bits) * words_of_inputs(bits);
  std::uint32_t value = 0;
  NarrowInput(bits, input).for_each_run([&](std::int64_t number, auto shift, auto to, int count) {
    std::uint32_t word = 0;
    std::memcpy(&word, weights + ((first + number) * place.width + place.column) * 4, sizeof(word));
    value |= (word >> shift & ((1U << count) - 1)) << to;
  });
  return value;
}

void pack_narrow_row(std::byte* weights, const Quantization& quantization, Place place, std::int64_t k,
                     const std::byte* source) {
  const std::int32_t bits = quantization.bits;
  const std::int64_t inputs = packed_inputs(bits);
  const std::int64_t num_words = words_of_inputs(bits);
  const std::int32_t least = is_signed(quantization) ? -(1 << (bits - 1)) : 0;
  const std::int32_t greatest = least + (1 << bits) - 1;
  for (std::int64_t begin = 0; begin < k; begin += inputs) {
    std::uint32_t words[3] = {};
    for (std::int64_t i = begin; i < begin + inputs; ++i) {
      const auto pair = static_cast<std::int32_t>(source[i / 2]);
      std::int32_t value = (i % 2 == 0 ? pair : pair >> 4) & 15;
      if (is_signed(quantization)) value = (value ^ 8) - 8;
      if (value < least || value > greatest) {
        throw CheckpointError("a weight of " + std::to_string(bits) + " bits is " + std::to_string(value) +
                              "; it must be " + std::to_string(least) + " to " + std::to_string(greatest));
      }
      NarrowInput(bits, i).for_each_run([&](std::int64_t number, auto shift, auto from, int count) {
        words[number] |= (static_cast<std::uint32_t>(value - least) >> from & ((1U << count) - 1)) << shift;
      });
    }
    for (std::int64_t word = 0; word < num_words; ++word) {
      const std::int64_t line = begin / inputs * num_words + word;
      std::memcpy(weights + (line * place.width + place.column) * 4, &words[word], sizeof(words[word]));
    }
  }
}

/// Packs one output's scales or minimums.
void pack_scales(std::byte* scales, const Quantization& quantization, Place place, std::int64_t groups,
                 const float* source) {
  for (std::int64_t group = 0; group < groups; ++group) {
    if (has_typed_scales(quantization)) {
      const auto index = static_cast<std::size_t>(group * place.width + place.column);
      store_from_float(scales, quantization.scale_type, index, source[group]);
    } else {
      store_from_float(scales, DType::kFloat32, static_cast<std::size_t>(place.column), source[group]);
    }
  }
}

/// Byte offset of the input permutation, in a matrix whose panels have `bytes_of_panels` bytes.
std::size_t order_offset(std::size_t bytes_of_panels) {
  constexpr std::size_t kOrderAlignment = alignof(std::int32_t);
  return (bytes_of_panels + kOrderAlignment - 1) / kOrderAlignment * kOrderAlignment;
}

/// Rounds `value` to `type`.
float rounded(float value, DType type) {
  float stored = 0.0F;
  auto* bytes = reinterpret_cast<std::byte*>(&stored);
  store_from_float(bytes, type, 0, value);
  return load_as_float(bytes, type, 0);
}

/// An FP8 number has the bits of a float16 whose exponent is eight higher.
float float8_to_float(std::byte number) {
  const auto bits = static_cast<std::uint32_t>(number);
  return 256.0F * float16_to_float(static_cast<std::uint16_t>((bits & 0x80U) << 8U | (bits & 0x7fU) << 7U));
}

/// Unpacks the row of an eight-bit matrix.
void unpack_octets(const PanelMatrix& matrix, const QuantizedPanel& parts, Place place, float* out) {
  const Quantization& how = matrix.quantization;
  const DType scale_type = has_typed_scales(how) ? how.scale_type : DType::kFloat32;
  const std::int64_t size = how.group_size == 0 ? matrix.k : how.group_size;
  for (std::int64_t i = 0; i < matrix.k; ++i) {
    const std::byte octet = parts.weights[int8_offset(how.algo, place.width, place.column, i)];
    const auto integer = static_cast<int>(static_cast<std::int8_t>(octet));
    const auto at = static_cast<std::size_t>(i / size * place.width + place.column);
    const float scale = load_as_float(parts.scales, scale_type, at);
    if (how.code == WeightCode::kE4M3) {
      out[i] = rounded(float8_to_float(octet) * scale, how.value_type);
    } else if (how.code == WeightCode::kLLMInt8) {
      const float product = static_cast<float>(integer) * scale;
      out[i] = rounded(product * kLLMInt8Factor, how.value_type);
    } else if (how.minimums) {
      const float product = scale * static_cast<float>(integer);
      out[i] = product - load_as_float(parts.extra, scale_type, at);
    } else {
      const int zero = how.zero_points ? static_cast<int>(parts.extra[at]) - middle_of_zeros(how.algo) : 0;
      out[i] = scale * static_cast<float>(integer - zero);
    }
  }
}

/// Unpacks the row of a matrix of four bits or fewer.
void unpack_words(const PanelMatrix& matrix, const QuantizedPanel& parts, Place place, float* out) {
  const Quantization& how = matrix.quantization;
  const std::int64_t size = how.group_size == 0 ? matrix.k : how.group_size;
  for (std::int64_t i = 0; i < matrix.k; ++i) {
    const auto at = static_cast<std::size_t>(i / size * place.width + place.column);
    const float scale = load_as_float(parts.scales, how.scale_type, at);
    const int zero = how.zero_points ? static_cast<int>(parts.extra[at]) : 1 << (how.bits - 1);
    const std::uint32_t value =
        how.bits == 4 ? int4_value(parts.weights, place, i) : narrow_value(parts.weights, how.bits, place, i);
    if (how.is_codebook()) {
      out[i] = rounded(scale * code_table(how.code)[value], how.value_type);
    } else if (how.minimums) {
      const float product = scale * static_cast<float>(value);
      out[i] = product - load_as_float(parts.extra, how.scale_type, at);
    } else {
      out[i] = scale * static_cast<float>(static_cast<int>(value) - zero);
    }
  }
}

}  // namespace

std::string_view name_of(WeightCode code) {
  switch (code) {
    case WeightCode::kInteger:
      return "INTEGER";
    case WeightCode::kNF4:
      return "NF4";
    case WeightCode::kFP4:
      return "FP4";
    case WeightCode::kE4M3:
      return "E4M3";
    case WeightCode::kE2M1:
      return "E2M1";
    case WeightCode::kLLMInt8:
      return "LLM_INT8";
  }
  return "unknown";
}

const std::array<float, 16>& code_table(WeightCode code) {
  static constexpr std::array<float, 16> kIntegers = {-8.0F, -7.0F, -6.0F, -5.0F, -4.0F, -3.0F, -2.0F, -1.0F,
                                                      0.0F,  1.0F,  2.0F,  3.0F,  4.0F,  5.0F,  6.0F,  7.0F};
  static constexpr std::array<float, 16> kNF4 = {-1.0F,
                                                 -0.6961928009986877F,
                                                 -0.5250730514526367F,
                                                 -0.39491748809814453F,
                                                 -0.28444138169288635F,
                                                 -0.18477343022823334F,
                                                 -0.09105003625154495F,
                                                 0.0F,
                                                 0.07958029955625534F,
                                                 0.16093020141124725F,
                                                 0.24611230194568634F,
                                                 0.33791524171829224F,
                                                 0.44070982933044434F,
                                                 0.5626170039176941F,
                                                 0.7229568362236023F,
                                                 1.0F};
  static constexpr std::array<float, 16> kFP4 = {
      0.0F, 0.0625F / 12,  8.0F / 12,  1.0F,  4.0F / 12,  6.0F / 12,  2.0F / 12,  3.0F / 12,
      0.0F, -0.0625F / 12, -8.0F / 12, -1.0F, -4.0F / 12, -6.0F / 12, -2.0F / 12, -3.0F / 12};
  static constexpr std::array<float, 16> kE2M1 = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                                  -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};
  switch (code) {
    case WeightCode::kNF4:
      return kNF4;
    case WeightCode::kFP4:
      return kFP4;
    case WeightCode::kE2M1:
      return kE2M1;
    case WeightCode::kInteger:
    case WeightCode::kE4M3:
    case WeightCode::kLLMInt8:
      break;
  }
  return kIntegers;
}

std::string_view name_of(QuantAlgo algo) {
  switch (algo) {
    case QuantAlgo::kNone:
      return "NONE";
    case QuantAlgo::kW8A16:
      return "W8A16";
    case QuantAlgo::kW8A8:
      return "W8A8";
    case QuantAlgo::kW4A16:
      return "W4A16";
    case QuantAlgo::kW4A8:
      return "W4A8";
  }
  return "unknown";
}

std::size_t panel_bytes(const Quantization& quantization, DType dtype, std::int64_t n, std::int64_t k) {
  if (quantization.algo == QuantAlgo::kNone) return panel_bytes(dtype, n, k);
  const auto panels = static_cast<std::size_t>(n * output_bytes(quantization, k));
  if (!quantization.act_order) return panels;
  return order_offset(panels) + static_cast<std::size_t>(k) * sizeof(std::int32_t);
}

std::span<const std::int32_t> PanelMatrix::permutation() const {
  if (!quantization.act_order) return {};
  const std::byte* order = data + order_offset(bytes_of_panels());
  return {reinterpret_cast<const std::int32_t*>(order), static_cast<std::size_t>(k)};
}

void pack_permutation(std::byte* behind, const Quantization& quantization, std::int64_t n, std::int64_t k,
                      const std::int32_t* order) {
  const auto panels = static_cast<std::size_t>(n * output_bytes(quantization, k));
  const std::size_t padding = order_offset(panels) - panels;
  std::memset(behind, 0, padding);
  std::memcpy(behind + padding, order, static_cast<std::size_t>(k) * sizeof(*order));
}

std::size_t panel_offset(const Quantization& quantization, DType dtype, std::int64_t k, std::int64_t panel) {
  if (quantization.algo == QuantAlgo::kNone) return panel_offset(dtype, k, panel);
  return static_cast<std::size_t>(panel * kPanelColumns * output_bytes(quantization, k));
}

QuantizedPanel parts_of_panel(const Quantization& quantization, const std::byte* panel, std::int64_t k,
                              std::int64_t width) {
  const std::byte* scales = panel + width * weight_bytes(quantization, k);
  const std::byte* extra = scales + width * scale_bytes(quantization, k);
  return {panel, scales, extra_bytes(quantization, k) > 0 ? extra : nullptr};
}

void pack_quantized_panels(std::byte* panels, const Quantization& quantization, std::int64_t n,
                           std::int64_t k, std::int64_t first_row, std::int64_t rows,
                           const QuantizedRows& source) {
  const std::int64_t groups = group_count(quantization, k);
  const bool has_words = has_few_bits(quantization.algo);
  const std::int64_t source_bytes = has_words ? groups_of(k, 2) : k;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = first_row + i;
    const std::int64_t panel = row / kPanelColumns;
    const Place place{panel_width(n, panel), row % kPanelColumns};
    std::byte* data = panels + panel_offset(quantization, DType::kFloat32, k, panel);
    std::byte* scales = data + place.width * weight_bytes(quantization, k);
    std::byte* extra = scales + place.width * scale_bytes(quantization, k);
    const std::byte* weights = source.weights + i * source_bytes;
    pack_scales(scales, quantization, place, groups, source.scales + i * groups);
    if (!has_words) {
      pack_int8_row(data, quantization, place, k, weights, extra);
    } else if (quantization.bits == 4) {
      pack_int4_row(data, quantization, place, k, weights);
    } else {
      pack_narrow_row(data, quantization, place, k, weights);
    }
    if (quantization.minimums) {
      pack_scales(extra, quantization, place, groups, source.minimums + i * groups);
    }
    if (!quantization.zero_points) continue;
    for (std::int64_t group = 0; group < groups; ++group) {
      extra[group * place.width + place.column] = std::byte{source.zeros[i * groups + group]};
    }
  }
}

void unpack_quantized_row(const PanelMatrix& matrix, std::int64_t row, float* out) {
  const Quantization& quantization = matrix.quantization;
  const std::int64_t panel = row / kPanelColumns;
  const Place place{panel_width(matrix.n, panel), row % kPanelColumns};
  const auto parts = parts_of_panel(quantization, matrix.data + matrix.offset(panel), matrix.k, place.width);
  if (has_few_bits(quantization.algo)) {
    unpack_words(matrix, parts, place, out);
  } else {
    unpack_octets(matrix, parts, place, out);
  }
  if (quantization.act_order) put_in_order(matrix.permutation(), out);
}

void put_in_order(std::span<const std::int32_t> order, float* values) {
  const std::vector<float> stored(values, values + order.size());
  for (std::size_t i = 0; i < order.size(); ++i) values[order[i]] = stored[i];
}

}  // namespace adaptrt
