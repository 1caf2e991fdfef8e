#include "adaptrt/core/quantized_panels.h"

#include <algorithm>
#include <cstring>

#include "unpack_quantized.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kInt8Inputs = 4;  // to whole groups of which int8 panels are padded in k

std::int64_t groups_of(std::int64_t k, std::int64_t inputs) {
  return (k + inputs - 1) / inputs;
}

/// Bytes of the weights of one output.
std::int64_t weight_bytes(const Quantization& quantization, std::int64_t k) {
  if (quantization.algo == QuantAlgo::kW4A16) return groups_of(k, kInt4Inputs) * kInt8Inputs;
  return groups_of(k, kInt8Inputs) * kInt8Inputs;
}

std::int64_t scale_bytes(const Quantization& quantization, std::int64_t k) {
  if (quantization.algo != QuantAlgo::kW4A16) return 4;
  return static_cast<std::int64_t>(size_of(quantization.scale_type)) * group_count(quantization, k);
}

std::int64_t extra_bytes(const Quantization& quantization, std::int64_t k) {
  if (quantization.algo == QuantAlgo::kW8A8) return 4;
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
        if (!quantization.zero_points && !quantization.is_coded()) value ^= 8U;
      }
      bits |= value << static_cast<unsigned>(int4_shift(i));
    }
    std::memcpy(weights + (word * place.width + place.column) * 4, &bits, sizeof(bits));
  }
}

void pack_scales(std::byte* scales, const Quantization& quantization, Place place, std::int64_t groups,
                 const float* source) {
  for (std::int64_t group = 0; group < groups; ++group) {
    if (quantization.algo == QuantAlgo::kW4A16) {
      const auto index = static_cast<std::size_t>(group * place.width + place.column);
      store_from_float(scales, quantization.scale_type, index, source[group]);
    } else {
      store_from_float(scales, DType::kFloat32, static_cast<std::size_t>(place.column), source[group]);
    }
  }
}

/// What `value` is in a type.
float rounded(float value, DType type) {
  float stored = 0.0F;
  auto* bytes = reinterpret_cast<std::byte*>(&stored);
  store_from_float(bytes, type, 0, value);
  return load_as_float(bytes, type, 0);
}

}  // namespace

std::string_view name_of(FourBitCode code) {
  switch (code) {
    case FourBitCode::kInteger:
      return "INTEGER";
    case FourBitCode::kNF4:
      return "NF4";
    case FourBitCode::kFP4:
      return "FP4";
    case FourBitCode::kE2M1:
      return "E2M1";
  }
  return "unknown";
}

const std::array<float, 16>& code_table(FourBitCode code) {
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
    case FourBitCode::kNF4:
      return kNF4;
    case FourBitCode::kFP4:
      return kFP4;
    case FourBitCode::kE2M1:
      return kE2M1;
    case FourBitCode::kInteger:
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
  }
  return "unknown";
}

std::size_t panel_bytes(const Quantization& quantization, DType dtype, std::int64_t n, std::int64_t k) {
  if (quantization.algo == QuantAlgo::kNone) return panel_bytes(dtype, n, k);
  return static_cast<std::size_t>(n * output_bytes(quantization, k));
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
  const bool is_int4 = quantization.algo == QuantAlgo::kW4A16;
  const std::int64_t source_bytes = is_int4 ? groups_of(k, 2) : k;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = first_row + i;
    const std::int64_t panel = row / kPanelColumns;
    const Place place{panel_width(n, panel), row % kPanelColumns};
    std::byte* data = panels + panel_offset(quantization, DType::kFloat32, k, panel);
    std::byte* scales = data + place.width * weight_bytes(quantization, k);
    std::byte* extra = scales + place.width * scale_bytes(quantization, k);
    const std::byte* weights = source.weights + i * source_bytes;
    pack_scales(scales, quantization, place, groups, source.scales + i * groups);
    if (!is_int4) {
      pack_int8_row(data, quantization, place, k, weights, extra);
      continue;
    }
    pack_int4_row(data, quantization, place, k, weights);
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
  if (quantization.algo != QuantAlgo::kW4A16) {
    const float scale = load_as_float(parts.scales, DType::kFloat32, static_cast<std::size_t>(place.column));
    for (std::int64_t i = 0; i < matrix.k; ++i) {
      const std::byte value = parts.weights[int8_offset(quantization.algo, place.width, place.column, i)];
      out[i] = scale * static_cast<float>(static_cast<std::int8_t>(value));
    }
    return;
  }
  const std::int64_t size = quantization.group_size == 0 ? matrix.k : quantization.group_size;
  for (std::int64_t i = 0; i < matrix.k; ++i) {
    const std::int64_t at = i / size * place.width + place.column;
    const float scale = load_as_float(parts.scales, quantization.scale_type, static_cast<std::size_t>(at));
    const int zero = parts.extra != nullptr ? static_cast<int>(parts.extra[at]) : kInt4Zero;
    std::uint32_t bits = 0;
    std::memcpy(&bits, parts.weights + (i / kInt4Inputs * place.width + place.column) * 4, sizeof(bits));
    const std::uint32_t value = (bits >> static_cast<unsigned>(int4_shift(i))) & 15U;
    if (quantization.is_coded()) {
      out[i] = rounded(scale * code_table(quantization.code)[value], quantization.value_type);
    } else {
      out[i] = scale * static_cast<float>(static_cast<int>(value) - zero);
    }
  }
}

}  // namespace adaptrt
