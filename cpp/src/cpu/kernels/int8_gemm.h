#pragma once

// Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

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

inline constexpr std::int64_t kInt8VectorBytes = Simd::kLanes * 4;

/// A stretch of k, in steps of four inputs, that a tile is multiplied by. Sums of integers are exact, so a
/// tile's sums may be stored in `out` between stretches.
struct Int8Part {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t steps;  ///< of the whole panel

  [[nodiscard]] bool continues() const { return begin > 0; }
  [[nodiscard]] bool ends() const { return end == steps; }
};

/// The rows and the columns that a tile multiplies in `steps` steps of four inputs.
struct Int8Operands {
  const std::uint8_t* a;
  std::int64_t a_stride;
  const std::byte* b;
  std::int64_t row_bytes;  ///< from one step of `b` to the next
  std::int64_t steps;
};

/// Adds dot products of four inputs to `sums`. lanes_of(v) is the number of columns of vector v.
template <int kRows, int kVectors, int kLines, class Lanes, class Fetch>
inline void multiply_int8_dots(Int8Operands in, Simd::Words (&sums)[kRows][kVectors], const Lanes& lanes_of,
                               Fetch prefetch) {
  for (std::int64_t step = 0; step < in.steps; ++step) {
    Simd::Words columns[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = Simd::load_words(in.b + v * kInt8VectorBytes, lanes_of(v));
    }
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      std::uint32_t four = 0;
      std::memcpy(&four, in.a + r * in.a_stride, sizeof(four));
      const Simd::Words value = Simd::set_words(four);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::dot(sums[r][v], value, columns[v]);
    }
    prefetch_lines<kLines>(&prefetch);
    in.a += 4;
    in.b += in.row_bytes;
  }
}

#ifdef __ARM_FEATURE_MATMUL_INT8

/// Adds products of matrices: two rows and two columns, eight inputs at a time. It needs half as many
/// multiplications as multiply_int8_dots(), and two instructions for each vector of two steps to bring the
/// inputs of a column together. An odd last row is multiplied twice, which takes no more instructions than
/// its dot products would.
template <int kRows, int kVectors, int kLines, class Lanes, class Fetch>
inline void multiply_int8_matrices(Int8Operands in, Simd::Words (&sums)[kRows][kVectors],
                                   const Lanes& lanes_of, Fetch prefetch) {
  constexpr int kPairs = (kRows + 1) / 2;
  // The 64-bit halves of products[p][v][h] are the sums of two rows, each with the columns 2h and 2h + 1.
  int32x4_t products[kPairs][kVectors][2];
  const auto second_row = [](int pair) { return std::min(2 * pair + 1, kRows - 1); };
  ADAPTRT_UNROLL
  for (int p = 0; p < kPairs; ++p) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64x2_t first = vreinterpretq_s64_u32(sums[2 * p][v]);
      const int64x2_t second = vreinterpretq_s64_u32(sums[second_row(p)][v]);
      products[p][v][0] = vreinterpretq_s32_s64(vzip1q_s64(first, second));
      products[p][v][1] = vreinterpretq_s32_s64(vzip2q_s64(first, second));
    }
  }
  // kSteps is 2, or 1 for the last step of an odd number: then the upper four inputs are zero.
  const auto multiply = [&]<int kSteps>(std::integral_constant<int, kSteps>) __attribute__((always_inline)) {
    uint8x16_t rows[kPairs];
    const auto inputs_of = [&](int row) {
      std::uint64_t inputs = 0;
      std::memcpy(&inputs, in.a + row * in.a_stride, 4 * kSteps);
      return vcreate_u8(inputs);
    };
    ADAPTRT_UNROLL
    for (int p = 0; p < kPairs; ++p) rows[p] = vcombine_u8(inputs_of(2 * p), inputs_of(second_row(p)));
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::byte* from = in.b + v * kInt8VectorBytes;
      const Simd::Words low = Simd::load_words(from, lanes_of(v));
      const Simd::Words high =
          kSteps == 2 ? Simd::load_words(from + in.row_bytes, lanes_of(v)) : Simd::zero_words();
      const int8x16_t columns[2] = {vreinterpretq_s8_u32(vzip1q_u32(low, high)),
                                    vreinterpretq_s8_u32(vzip2q_u32(low, high))};
      ADAPTRT_UNROLL
      for (int p = 0; p < kPairs; ++p) {
        products[p][v][0] = vusmmlaq_s32(products[p][v][0], rows[p], columns[0]);
        products[p][v][1] = vusmmlaq_s32(products[p][v][1], rows[p], columns[1]);
      }
    }
    ADAPTRT_UNROLL
    for (int step = 0; step < kSteps; ++step) prefetch_lines<kLines>(&prefetch);
    in.a += 4 * kSteps;
    in.b += kSteps * in.row_bytes;
  };
  for (std::int64_t step = 0; step + 2 <= in.steps; step += 2) multiply(std::integral_constant<int, 2>{});
  if (in.steps % 2 != 0) multiply(std::integral_constant<int, 1>{});
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64x2_t low = vreinterpretq_s64_s32(products[r / 2][v][0]);
      const int64x2_t high = vreinterpretq_s64_s32(products[r / 2][v][1]);
      sums[r][v] = vreinterpretq_u32_s64(r % 2 == 0 ? vzip1q_s64(low, high) : vzip2q_s64(low, high));
    }
  }
}

#endif

/// Adds the products of `in` to `sums`. They are exact, so all ways give the same.
template <int kRows, int kVectors, int kLines, class Lanes, class Fetch>
inline void multiply_int8(const Int8Operands& in, Simd::Words (&sums)[kRows][kVectors], const Lanes& lanes_of,
                          const Fetch& prefetch) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  if constexpr (kRows > 1) {
    multiply_int8_matrices<kRows, kVectors, kLines>(in, sums, lanes_of, prefetch);
    return;
  }
#endif
  multiply_int8_dots<kRows, kVectors, kLines>(in, sums, lanes_of, prefetch);
}

/// Multiplies kRows rows by kVectors vectors of columns; the last one has last_lanes columns. Between parts,
/// `out` holds integers. `prefetch` is a Prefetch or a StepPrefetch.
template <int kRows, int kVectors, bool kPartial, int kLines, class Fetch>
void int8_tile(const Int8Gemm& gemm, const QuantizedPanel& panel, Int8Part part, std::int64_t row,
               std::int64_t column, std::int64_t last_lanes, Fetch prefetch) {
  constexpr std::int64_t kColumnBytes = 4;
  constexpr std::int64_t kVectorBytes = kInt8VectorBytes;
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
  const Int8Operands operands{a, gemm.call.a_stride, b, row_bytes, part.end - part.begin};
  multiply_int8<kRows, kVectors, kLines>(operands, sums, lanes_of, prefetch);
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
