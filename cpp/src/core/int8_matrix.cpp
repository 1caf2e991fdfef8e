#include "adaptrt/core/int8_matrix.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "adaptrt/core/convert.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kPair = 2;
constexpr float kGreatest = 127.0F;

/// Calls visit(panel, first input, row) for the rows of a W[n, k]'s panels, as float32 [w][ki].
template <class Visit>
void for_each_row(const std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, const Visit& visit) {
  const std::int64_t interleave = k_interleave(dtype);
  std::array<float, kPanelColumns * kPair> row;
  for (std::int64_t panel = 0; panel < panel_count(n); ++panel) {
    const auto elements = static_cast<std::size_t>(panel_width(n, panel) * interleave);
    for (std::int64_t input = 0; input < k; input += interleave) {
      convert_elements(reinterpret_cast<std::byte*>(row.data()), DType::kFloat32, panels, dtype, elements);
      panels += elements * size_of(dtype);
      visit(panel, input, std::span<const float>(row.data(), elements));
    }
  }
}

/// Maxima of several lanes: compilers vectorise them, but not the maximum of one sequence.
struct LaneMaxima {
  static constexpr std::size_t kLanes = 16;
  std::array<float, kLanes> lanes{};

  void add(std::span<const float> values) {
    std::size_t i = 0;
    for (; i + kLanes <= values.size(); i += kLanes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = std::max(lanes[lane], std::abs(values[i + lane]));
      }
    }
    for (; i < values.size(); ++i) lanes[i % kLanes] = std::max(lanes[i % kLanes], std::abs(values[i]));
  }
};

/// Rounds to nearest even: adding this number leaves no bits for a fraction.
float round_small(float value) {
  constexpr float kNoFraction = 0x1.8p23F;
  return value + kNoFraction - kNoFraction;
}

std::int8_t round_clamped(float quotient) {
  // NaN becomes 127.
  const float clamped = std::max(-kGreatest, std::min(kGreatest, quotient));
  return static_cast<std::int8_t>(static_cast<std::int32_t>(round_small(clamped)));
}

/// Divisor for a scale: values with scale 0 become 0.
float divisor_of(float scale) {
  return scale == 0.0F ? std::numeric_limits<float>::infinity() : scale;
}

}  // namespace

void raise_maxima(const std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, ScaleAxis axis,
                  std::span<float> maxima) {
  const auto interleave = static_cast<std::size_t>(k_interleave(dtype));
  const auto raise = [&](std::int64_t index, float value) {
    float& maximum = maxima[static_cast<std::size_t>(index)];
    maximum = std::max(maximum, value);
  };
  if (axis == ScaleAxis::kInputs) {
    for_each_row(panels, dtype, n, k, [&](std::int64_t, std::int64_t input, std::span<const float> row) {
      LaneMaxima found;
      found.add(row);
      for (std::size_t lane = 0; lane < LaneMaxima::kLanes; ++lane) {
        const auto of = static_cast<std::int64_t>(lane % interleave);
        if (input + of < k) raise(input + of, found.lanes[lane]);
      }
    });
    return;
  }
  std::array<float, kPanelColumns * kPair> of_panel{};
  for_each_row(panels, dtype, n, k, [&](std::int64_t panel, std::int64_t input, std::span<const float> row) {
    for (std::size_t i = 0; i < row.size(); ++i) of_panel[i] = std::max(of_panel[i], std::abs(row[i]));
    if (input + static_cast<std::int64_t>(interleave) < k) return;
    for (std::size_t i = 0; i < row.size(); ++i) {
      raise(panel * kPanelColumns + static_cast<std::int64_t>(i / interleave), of_panel[i]);
    }
    of_panel.fill(0.0F);
  });
}

void round_to_int8(const std::byte* panels, DType dtype, std::int64_t n, std::int64_t k, ScaleAxis axis,
                   std::span<const float> scales, std::byte* out) {
  std::memset(out, 0, int8_matrix_bytes(n, k));
  const auto interleave = static_cast<std::size_t>(k_interleave(dtype));
  std::array<float, kPanelColumns * kPair> divisors;
  for_each_row(panels, dtype, n, k, [&](std::int64_t panel, std::int64_t input, std::span<const float> row) {
    if (axis == ScaleAxis::kInputs) {
      for (std::size_t i = 0; i < interleave; ++i) {
        const std::int64_t padded = input + static_cast<std::int64_t>(i);
        const float divisor = divisor_of(scales[static_cast<std::size_t>(std::min(padded, k - 1))]);
        for (std::size_t at = i; at < row.size(); at += interleave) divisors[at] = divisor;
      }
    } else if (input == 0) {
      const std::span<const float> of_panel = scales.subspan(static_cast<std::size_t>(panel * kPanelColumns));
      for (std::size_t i = 0; i < row.size(); ++i) divisors[i] = divisor_of(of_panel[i / interleave]);
    }
    const std::int64_t width = panel_width(n, panel);
    auto* to = reinterpret_cast<std::int8_t*>(out + int8_matrix_offset(k, panel) +
                                              static_cast<std::size_t>(input / kPair * width * kPair));
    if (interleave == kPair) {
      for (std::size_t i = 0; i < row.size(); ++i) to[i] = round_clamped(row[i] / divisors[i]);
    } else {
      to += input % kPair;
      for (std::size_t i = 0; i < row.size(); ++i) to[i * kPair] = round_clamped(row[i] / divisors[i]);
    }
  });
}

void unpack_int8_row(const std::byte* matrix, std::int64_t n, std::int64_t k, std::int64_t row, float* out) {
  const std::int64_t panel = row / kPanelColumns;
  const std::int64_t width = panel_width(n, panel);
  const auto* from = reinterpret_cast<const std::int8_t*>(matrix + int8_matrix_offset(k, panel)) +
                     row % kPanelColumns * kPair;
  for (std::int64_t i = 0; i < k; ++i) {
    out[i] = static_cast<float>(from[i / kPair * width * kPair + i % kPair]);
  }
}

}  // namespace adaptrt
