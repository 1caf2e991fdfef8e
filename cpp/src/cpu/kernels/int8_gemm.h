#pragma once

// Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "elementwise.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Maximum number of rows for which memory is the limit, if there is more than one tile of rows.
inline constexpr std::int64_t kInt8StreamRows = 24;
/// Number of steps of four inputs that all tiles are multiplied by before the next steps. The current and the
/// next steps fit in the first-level cache.
inline constexpr std::int64_t kInt8StreamSteps = 64;

/// A stretch of k, in steps of four inputs, that a tile is multiplied by. Sums of integers are exact, so a
/// tile's sums may be stored in `out` between stretches.
struct Int8Part {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t steps;  ///< of the whole panel

  [[nodiscard]] bool continues() const { return begin > 0; }
  [[nodiscard]] bool ends() const { return end == steps; }
};

/// Multiplies kRows rows by kVectors vectors of columns; the last one has last_lanes columns. Between parts,
/// `out` holds integers. `prefetch` is a Prefetch or a StepPrefetch.
template <int kRows, int kVectors, bool kPartial, int kLines, class Fetch>
void int8_tile(const Int8Gemm& gemm, const QuantizedPanel& panel, Int8Part part, std::int64_t row,
               std::int64_t column, std::int64_t last_lanes, Fetch prefetch) {
  constexpr std::int64_t kColumnBytes = 4;
  constexpr std::int64_t kVectorBytes = Simd::kLanes * kColumnBytes;
  const std::int64_t row_bytes = gemm.call.width * kColumnBytes;
  const std::uint8_t* a =
      static_cast<const std::uint8_t*>(gemm.call.a) + row * gemm.call.a_stride + part.begin * 4;
  const std::byte* b = panel.weights + part.begin * row_bytes + column * kColumnBytes;
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  const auto out_of = [&](int r) { return gemm.call.out + (row + r) * gemm.call.out_stride + column; };
  Simd::Words sums[kRows][kVectors];
  if (part.continues()) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const std::byte* out = reinterpret_cast<const std::byte*>(out_of(r));
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::load_words(out + v * kVectorBytes, lanes_of(v));
    }
  } else {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::zero_words();
    }
  }
  for (std::int64_t step = part.begin; step < part.end; ++step) {
    Simd::Words columns[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) columns[v] = Simd::load_words(b + v * kVectorBytes, lanes_of(v));
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      std::uint32_t four = 0;
      std::memcpy(&four, a + r * gemm.call.a_stride, sizeof(four));
      const Simd::Words value = Simd::set_words(four);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::dot(sums[r][v], value, columns[v]);
    }
    prefetch_lines<kLines>(&prefetch);
    a += 4;
    b += row_bytes;
  }
  if (!part.ends()) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      std::byte* out = reinterpret_cast<std::byte*>(out_of(r));
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) Simd::store_words(out + v * kVectorBytes, sums[r][v], lanes_of(v));
    }
    return;
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Simd::Vec row_scale = Simd::set(gemm.a_scales[row + r]);
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = lanes_of(v);
      const std::int64_t offset = column + v * Simd::kLanes;
      // Activations are stored with 128 added.
      const Simd::Words excess = Simd::load_words(panel.extra + offset * 4, lanes);
      const Simd::Vec sum = Simd::words_to_floats(Simd::subtract_words(sums[r][v], excess));
      const Simd::Vec scale = Simd::load(reinterpret_cast<const float*>(panel.scales) + offset, lanes);
      Simd::store(out_of(r) + v * Simd::kLanes, Simd::mul(Simd::mul(sum, scale), row_scale), lanes);
    }
  }
}

template <int kVectors, bool kPartial, int kLines, int kRows = kTileRows, class Fetch = Prefetch>
void int8_rows(const Int8Gemm& gemm, const QuantizedPanel& panel, Int8Part part, std::int64_t row,
               std::int64_t rows, std::int64_t column, std::int64_t last_lanes, Fetch prefetch) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      int8_rows<kVectors, kPartial, kLines, kRows - 1>(gemm, panel, part, row, rows, column, last_lanes,
                                                       prefetch);
      return;
    }
  }
  int8_tile<kRows, kVectors, kPartial, kLines>(gemm, panel, part, row, column, last_lanes, prefetch);
}

/// Multiplies a group of whole vectors of columns. All tiles are multiplied by a stretch of k before the next
/// one is read, so that each stretch is read from memory once. Meanwhile they prefetch the next stretch to
/// the first-level cache.
inline void int8_streamed(const Int8Gemm& gemm, const QuantizedPanel& panel, std::int64_t column) {
  const std::int64_t row_bytes = gemm.call.width * 4;
  const std::int64_t steps = (gemm.call.k + 3) / 4;
  const std::int64_t tiles = (gemm.call.rows + kTileRows - 1) / kTileRows;
  const std::int64_t bytes = (row_bytes + tiles - 1) / tiles;  // each tile prefetches so many with each step
  const std::byte* next_panel = gemm.call.next_panel == nullptr ? panel.weights : gemm.call.next_panel;
  for (std::int64_t begin = 0; begin < steps; begin += kInt8StreamSteps) {
    const Int8Part part{begin, std::min(begin + kInt8StreamSteps, steps), steps};
    const std::byte* next = part.ends() ? next_panel : panel.weights + part.end * row_bytes;
    std::int64_t row = 0;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, tiles - tile);
      const Prefetch prefetch{next + tile * (part.end - begin) * bytes, bytes};
      if (bytes > kCacheLine) {
        int8_rows<kTileVectors, false, 2>(gemm, panel, part, row, rows, column, Simd::kLanes, prefetch);
      } else {
        int8_rows<kTileVectors, false, 1>(gemm, panel, part, row, rows, column, Simd::kLanes, prefetch);
      }
      row += rows;
    }
  }
}

/// Multiplies a group of whole vectors of columns, for a single tile or for so many that multiplying takes
/// longer than reading. Each tile is multiplied by all of k, and its sums stay in registers.
inline void int8_multiplied(const Int8Gemm& gemm, const QuantizedPanel& panel, std::int64_t column) {
  constexpr std::int64_t kGroupBytes = kTileVectors * Simd::kLanes * 4;
  constexpr int kStreamLines =
      Simd::kFetching.for_one_tile ? static_cast<int>((kGroupBytes + kCacheLine - 1) / kCacheLine) : 0;
  const std::int64_t steps = (gemm.call.k + 3) / 4;
  const std::int64_t tiles = (gemm.call.rows + kTileRows - 1) / kTileRows;
  const Int8Part whole{0, steps, steps};
  std::int64_t row = 0;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t rows = rows_of_tile(gemm.call.rows - row, tiles - tile);
    if (tile == 0) {
      const Prefetch prefetch{panel.weights + column * 4 + kStreamAhead, gemm.call.width * 4};
      int8_rows<kTileVectors, false, kStreamLines>(gemm, panel, whole, row, rows, column, Simd::kLanes,
                                                   prefetch);
    } else {
      int8_rows<kTileVectors, false, 0>(gemm, panel, whole, row, rows, column, Simd::kLanes, {});
    }
    row += rows;
  }
}

inline void int8_gemm(const Int8Gemm& gemm) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  const QuantizedPanel panel =
      parts_of_panel({.algo = QuantAlgo::kW8A8}, gemm.call.panel, gemm.call.k, gemm.call.width);
  const std::int64_t steps = (gemm.call.k + 3) / 4;
  std::int64_t column = 0;
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    if (gemm.call.rows > kTileRows && gemm.call.rows <= kInt8StreamRows) {
      int8_streamed(gemm, panel, column);
    } else {
      int8_multiplied(gemm, panel, column);
    }
  }
  for (; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    for (std::int64_t row = 0; row < gemm.call.rows; row += kTileRows) {
      const std::int64_t rows = std::min<std::int64_t>(kTileRows, gemm.call.rows - row);
      int8_rows<1, true, 0>(gemm, panel, {0, steps, steps}, row, rows, column, lanes, {});
    }
  }
}

inline void quantize_row(const std::byte* x, DType type, std::int64_t n, std::uint8_t* out, float* scale) {
  constexpr std::uint32_t kInfinity = 0x7f800000U;
  constexpr float kLeast = 0x1p-100F;      // 127 divided by a smaller number might not be finite
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const auto lanes_at = [&](std::int64_t i) { return std::min<std::int64_t>(Simd::kLanes, n - i); };
  const std::uint32_t greatest_bits =
      greatest_magnitude(n, [&](std::int64_t i, std::int64_t lanes) { return load_as(x, type, i, lanes); });
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
