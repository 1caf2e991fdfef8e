#pragma once

// Products of a few rows of bfloat16 without tile registers, to the bits that Tiles::dot_bfloat16 gives:
// tiles are filled from memory more slowly than vectors, and of a tile of rows most would be empty. Included
// behind tile_product.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "gemm.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Rows whose sums of even and odd inputs, for all columns of a panel, stay in registers.
inline constexpr std::int64_t kFewRows = 3;

/// Lets subnormal numbers count as zero, and become zero, while it lives, as they do in tiles.
class FlushSubnormals {
 public:
#ifdef __SSE__
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
#else
  FlushSubnormals() = default;
  ~FlushSubnormals() = default;
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#ifdef __SSE__
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x40;
  unsigned before_;
#endif
};

/// Rows of bfloat16, `stride` bytes apart, from the first input on.
struct FewRows {
  const std::byte* data;
  std::int64_t stride;
  std::int64_t inputs;
};

/// The sums of kRows rows and kVectors vectors of columns, the last one of last_lanes columns.
template <int kRows, int kVectors, bool kPartial>
void multiply_few_columns(FewRows a, TileColumns b, std::int64_t last_lanes, TileSums sums,
                          StepPrefetch* prefetch) {
  constexpr int kVectorBytes = Simd::kLanes * 4;
  // Vectors that are narrower than a cache line fetch nothing ahead.
  constexpr int kLines = kVectors * kVectorBytes / static_cast<int>(kCacheLine);
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  for (std::int64_t begin = 0; begin < a.inputs; begin += kStepInputs, b.data += b.step) {
    Simd::Vec even[kRows][kVectors];
    Simd::Vec odd[kRows][kVectors];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = Simd::zero();
    }
    const auto take = [&](std::int64_t pair, std::size_t bytes) __attribute__((always_inline)) {
      const std::byte* line = b.data + pair * b.line;
      Simd::Pair columns[kVectors];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = Simd::bfloat16_pairs(Simd::load_words(line + v * kVectorBytes, lanes_of(v)));
      }
      if constexpr (kLines > 0) prefetch->fetch_lines<kLines>();
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        std::uint32_t inputs = 0;
        std::memcpy(&inputs, a.data + r * a.stride + (begin + 2 * pair) * 2, bytes);
        const Simd::Pair values = Simd::bfloat16_pairs(Simd::set_words(inputs));
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          even[r][v] = Simd::fma(values.even, columns[v].even, even[r][v]);
          odd[r][v] = Simd::fma(values.odd, columns[v].odd, odd[r][v]);
        }
      }
    };
    constexpr std::size_t kPair = 4;
    const std::int64_t left = std::min(kStepInputs, a.inputs - begin);
    if (left == kStepInputs) {
      ADAPTRT_UNROLL
      for (std::int64_t pair = 0; pair < kTileHeight; ++pair) take(pair, kPair);
    } else {
      for (std::int64_t pair = 0; pair < left / 2; ++pair) take(pair, kPair);
      if (left % 2 != 0) take(left / 2, kPair / 2);
    }
    prefetch->fetch_step();
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float* out = sums.data + r * sums.stride;
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* at = out + v * Simd::kLanes;
        const Simd::Vec before = sums.continues || begin > 0 ? Simd::load(at, lanes_of(v)) : Simd::zero();
        Simd::store(at, Simd::add(before, Simd::add(even[r][v], odd[r][v])), lanes_of(v));
      }
    }
  }
}

/// sums [kRows, columns] = a * b, or += where they continue, for at most kPanelColumns columns.
template <int kRows>
void multiply_few(FewRows a, TileColumns b, std::int64_t columns, TileSums sums, StepPrefetch* prefetch) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  std::int64_t column = 0;
  const auto from = [&] { return TileColumns{b.data + column * 4, b.line, b.step}; };
  const auto to = [&] { return TileSums{sums.data + column, sums.stride, sums.continues}; };
  for (; column + kGroup <= columns; column += kGroup) {
    multiply_few_columns<kRows, kTileVectors, false>(a, from(), Simd::kLanes, to(), prefetch);
  }
  for (; column < columns; column += Simd::kLanes) {
    multiply_few_columns<kRows, 1, true>(a, from(), std::min<std::int64_t>(Simd::kLanes, columns - column),
                                         to(), prefetch);
  }
}

inline void multiply_few_rows(FewRows a, TileColumns b, std::int64_t columns, TileSums sums,
                              std::int64_t rows, StepPrefetch* prefetch) {
  const FlushSubnormals flush;
  switch (rows) {
    case 1:
      return multiply_few<1>(a, b, columns, sums, prefetch);
    case 2:
      return multiply_few<2>(a, b, columns, sums, prefetch);
    default:
      return multiply_few<kFewRows>(a, b, columns, sums, prefetch);
  }
}

}  // namespace
}  // namespace adaptrt
