#pragma once

// Included by the source of each instruction set, behind its simd_*.h and gemm.h, which says why.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/kernels/kernel_table.h"

namespace adaptrt {
namespace {

/// kRows rows times kVectors vectors of columns, the last one of last_lanes columns.
template <int kRows, int kVectors, bool kPartial, bool kStreams>
void int8_tile(const Int8Gemm& gemm, const QuantizedPanel& panel, std::int64_t row, std::int64_t column,
               std::int64_t last_lanes) {
  constexpr std::int64_t kColumnBytes = 4;
  constexpr std::int64_t kVectorBytes = Simd::kLanes * kColumnBytes;
  constexpr int kLines = static_cast<int>((kVectors * kVectorBytes + kCacheLine - 1) / kCacheLine);
  const std::int64_t row_bytes = gemm.width * kColumnBytes;
  const std::uint8_t* a = gemm.a + row * gemm.a_stride;
  const std::byte* b = panel.weights + column * kColumnBytes;
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  Simd::Words sums[kRows][kVectors];
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::zero_words();
  }
  for (std::int64_t k = 0; k < gemm.k; k += 4) {
    Simd::Words columns[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) columns[v] = Simd::load_words(b + v * kVectorBytes, lanes_of(v));
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      std::uint32_t four = 0;
      std::memcpy(&four, a + r * gemm.a_stride, sizeof(four));
      const Simd::Words value = Simd::set_words(four);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::dot(sums[r][v], value, columns[v]);
    }
    if constexpr (kStreams) {
      ADAPTRT_UNROLL
      for (int line = 0; line < kLines; ++line) {
        __builtin_prefetch(b + kStreamAhead + line * kCacheLine, 0, 3);
      }
    }
    a += 4;
    b += row_bytes;
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Simd::Vec row_scale = Simd::set(gemm.a_scales[row + r]);
    float* out = gemm.out + (row + r) * gemm.out_stride + column;
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = lanes_of(v);
      const std::int64_t offset = column + v * Simd::kLanes;
      // Activations were 128 too great.
      const Simd::Words excess = Simd::load_words(panel.extra + offset * 4, lanes);
      const Simd::Vec sum = Simd::words_to_floats(Simd::subtract_words(sums[r][v], excess));
      const Simd::Vec scale = Simd::load(reinterpret_cast<const float*>(panel.scales) + offset, lanes);
      Simd::store(out + v * Simd::kLanes, Simd::mul(Simd::mul(sum, scale), row_scale), lanes);
    }
  }
}

template <int kVectors, bool kPartial, bool kStreams, int kRows = kTileRows>
void int8_rows(const Int8Gemm& gemm, const QuantizedPanel& panel, std::int64_t row, std::int64_t rows,
               std::int64_t column, std::int64_t last_lanes) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      int8_rows<kVectors, kPartial, kStreams, kRows - 1>(gemm, panel, row, rows, column, last_lanes);
      return;
    }
  }
  int8_tile<kRows, kVectors, kPartial, kStreams>(gemm, panel, row, column, last_lanes);
}

void int8_gemm(const Int8Gemm& gemm) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  const QuantizedPanel panel = parts_of_panel({.algo = QuantAlgo::kW8A8}, gemm.panel, gemm.k, gemm.width);
  const std::int64_t blocks = (gemm.rows + kTileRows - 1) / kTileRows;
  for (std::int64_t column = 0; column < gemm.width;) {
    const bool full = column + kGroup <= gemm.width;
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.width - column);
    for (std::int64_t row = 0, block = 0; block < blocks; ++block) {
      const std::int64_t rows = (gemm.rows - row + blocks - block - 1) / (blocks - block);
      if (!full) {
        int8_rows<1, true, false>(gemm, panel, row, rows, column, lanes);
      } else if (block == 0) {
        int8_rows<kTileVectors, false, true>(gemm, panel, row, rows, column, Simd::kLanes);
      } else {
        int8_rows<kTileVectors, false, false>(gemm, panel, row, rows, column, Simd::kLanes);
      }
      row += rows;
    }
    column += full ? kGroup : Simd::kLanes;
  }
}

void quantize_row(const std::byte* x, DType type, std::int64_t n, std::uint8_t* out, float* scale) {
  constexpr std::uint32_t kInfinity = 0x7f800000U;
  constexpr float kLeast = 0x1p-100F;      // 127 divided by less might not be finite
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const auto lanes_at = [&](std::int64_t i) { return std::min<std::int64_t>(Simd::kLanes, n - i); };
  // The bits of numbers without their sign are ordered as the numbers are, with infinity and then NaN on top.
  Simd::Words bits = Simd::zero_words();
  for (std::int64_t i = 0; i < n; i += Simd::kLanes) {
    bits = Simd::greatest_of(bits, Simd::without_sign(load_as(x, type, i, lanes_at(i))));
  }
  std::uint32_t lanes[Simd::kLanes];
  Simd::store_words(reinterpret_cast<std::byte*>(lanes), bits, Simd::kLanes);
  const std::uint32_t greatest_bits = *std::max_element(lanes, lanes + Simd::kLanes);
  float greatest = 0.0F;
  std::memcpy(&greatest, &greatest_bits, sizeof(greatest));
  const bool finite = greatest_bits < kInfinity;
  const bool is_zero = greatest < kLeast;
  *scale = !finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0.0F : greatest / 127.0F;
  const Simd::Vec factor = Simd::set(finite && !is_zero ? 127.0F / greatest : 0.0F);
  for (std::int64_t i = 0; i < n; i += Simd::kLanes) {
    Simd::Vec value = Simd::mul(load_as(x, type, i, lanes_at(i)), factor);
    value = Simd::max(Simd::min(value, Simd::set(127.0F)), Simd::set(-127.0F));
    const Simd::Words rounded = Simd::floats_to_bits(Simd::add(value, Simd::set(kRounder + 128.0F)));
    Simd::store_low_bytes(out + i, rounded, lanes_at(i));
  }
  for (std::int64_t i = n; i % 4 != 0; ++i) out[i] = 128;
}

}  // namespace
}  // namespace adaptrt
