#pragma once

// Included by the source of each instruction set, after its simd_*.h. Everything here has internal linkage:
// the linker must not merge code that was compiled for different instruction sets.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"

#ifdef __clang__
#define ADAPTRT_UNROLL _Pragma("unroll")
#else
#define ADAPTRT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace adaptrt {
namespace {

inline constexpr std::int64_t kCacheLine = 64;
/// Maximum number of rows for which memory is the limit, and the number of steps of k whose weights are
/// decoded before all rows are multiplied by them: 16 KiB in bfloat16.
inline constexpr std::int64_t kStreamRows = 24;
inline constexpr std::int64_t kStreamSteps = 64;
/// Maximum number of cache lines of a panel that a step of k reads.
inline constexpr std::int64_t kMostLines = 4;

/// Cache lines to prefetch with each step of k, and the distance between those of two steps.
struct Prefetch {
  const std::byte* from = nullptr;
  std::int64_t step = 0;
};

template <int kLines, int kLocality = Simd::kFetching.locality>
inline void prefetch_lines(Prefetch* prefetch) {
  ADAPTRT_UNROLL
  for (int line = 0; line < kLines; ++line) {
    __builtin_prefetch(prefetch->from + line * kCacheLine, 0, kLocality);
  }
  prefetch->from += prefetch->step;
}

/// Prefetches spans of memory, some cache lines at a time.
class SpanFetcher {
 public:
  explicit SpanFetcher(std::span<const MemorySpan> spans) : spans_(spans) {}

  [[nodiscard]] std::int64_t lines() const {
    std::int64_t lines = 0;
    for (const MemorySpan& span : spans_) lines += (span.bytes + kCacheLine - 1) / kCacheLine;
    return lines;
  }

  void fetch(std::int64_t lines) {
    while (lines > 0 && next_ < spans_.size()) {
      const MemorySpan& span = spans_[next_];
      for (; lines > 0 && offset_ < span.bytes; --lines, offset_ += kCacheLine) {
        __builtin_prefetch(span.data + offset_, 0, 2);
      }
      if (offset_ < span.bytes) return;
      ++next_;
      offset_ = 0;
    }
  }

 private:
  std::span<const MemorySpan> spans_;
  std::size_t next_ = 0;
  std::int64_t offset_ = 0;
};

/// Rows of the next tile, such that all tiles are as even as possible.
inline std::int64_t rows_of_tile(std::int64_t rows_left, std::int64_t tiles_left) {
  return (rows_left + tiles_left - 1) / tiles_left;
}

/// Number of independent sums for each element, so that a narrow tile's additions do not wait for each other.
/// Step s of k is added to sum s % kChains; in the end the sums are added in pairs.
constexpr int chains_of(int vectors) {
  return vectors >= 3 ? 1 : vectors == 2 ? 2 : 4;
}

/// `continues`: the sums start from `out`. Only for whole vectors with a single sum for each element.
template <class Weights, int kRows, int kVectors, bool kPartial, int kLines>
void gemm_tile(const PanelGemm& gemm, std::int64_t row, std::int64_t column, std::int64_t last_lanes,
               bool continues, Prefetch prefetch) {
  using A = typename Weights::A;
  using Vec = Simd::Vec;
  constexpr int kChains = chains_of(kVectors);
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Weights::kColumnBytes;
  const std::int64_t row_bytes = gemm.call.width * Weights::kColumnBytes;
  const A* a = static_cast<const A*>(gemm.call.a) + row * gemm.call.a_stride;
  const std::byte* b = gemm.call.panel + column * Weights::kColumnBytes;
  const std::int64_t a_stride = gemm.call.a_stride;
  Vec sums[kChains][kRows][kVectors];
  ADAPTRT_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[chain][r][v] = Simd::zero();
    }
  }
  if constexpr (kChains == 1 && !kPartial) {
    if (continues) {
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float* before = gemm.call.out + (row + r) * gemm.call.out_stride + column;
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[0][r][v] = Simd::load(before + v * Simd::kLanes);
      }
    }
  }
  const auto step = [&](Vec(&sum)[kRows][kVectors], auto broadcast) __attribute__((always_inline)) {
    typename Weights::B columns[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::byte* from = b + v * kVectorBytes;
      columns[v] = kPartial && v == kVectors - 1 ? Weights::load(from, last_lanes) : Weights::load(from);
    }
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto value = broadcast(a + r * a_stride);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Weights::multiply_add(value, columns[v], sum[r][v]);
    }
    prefetch_lines<kLines>(&prefetch);
    a += Weights::kInterleave;
    b += row_bytes;
  };
  const auto whole = [](const A* from) __attribute__((always_inline)) { return Weights::broadcast(from); };
  const auto last = [](const A* from)
                        __attribute__((always_inline)) { return Weights::broadcast_last(from); };

  std::int64_t steps = gemm.call.k / Weights::kInterleave;
  for (; steps >= kChains; steps -= kChains) {
    ADAPTRT_UNROLL
    for (int chain = 0; chain < kChains; ++chain) step(sums[chain], whole);
  }
  const bool odd = gemm.call.k % Weights::kInterleave != 0;
  ADAPTRT_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    if (chain < steps) step(sums[chain], whole);
    if (chain == steps && odd) step(sums[chain], last);
  }

  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    float* out = gemm.call.out + (row + r) * gemm.call.out_stride + column;
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Vec sum = sums[0][r][v];
      if constexpr (kChains == 2) sum = Simd::add(sum, sums[1][r][v]);
      if constexpr (kChains == 4) {
        sum = Simd::add(Simd::add(sum, sums[1][r][v]), Simd::add(sums[2][r][v], sums[3][r][v]));
      }
      float* to = out + v * Simd::kLanes;
      if (kPartial && v == kVectors - 1) {
        if (gemm.accumulate) sum = Simd::add(Simd::load(to, last_lanes), sum);
        Simd::store(to, sum, last_lanes);
      } else {
        if (gemm.accumulate) sum = Simd::add(Simd::load(to), sum);
        Simd::store(to, sum);
      }
    }
  }
}

using TileFunction = void (*)(const PanelGemm&, std::int64_t, std::int64_t, std::int64_t, bool, Prefetch);

/// The tile function for a number of rows, from 1 to kRows.
template <class Weights, int kVectors, bool kPartial, int kLines, int kRows = kTileRows>
TileFunction tile_of_rows(std::int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of_rows<Weights, kVectors, kPartial, kLines, kRows - 1>(rows);
  }
  return &gemm_tile<Weights, kRows, kVectors, kPartial, kLines>;
}

/// Number of cache lines that a step of k touches for this number of vectors of columns.
template <class Weights>
constexpr int lines_of(int vectors) {
  return static_cast<int>((vectors * Simd::kLanes * Weights::kColumnBytes + kCacheLine - 1) / kCacheLine);
}

/// The tile function for `vectors` vectors of columns, the last of which is partial. Such tiles prefetch as
/// many lines as their steps have.
template <class Weights, int kVectors = kTileVectors>
TileFunction partial_tile_of(std::int64_t rows, std::int64_t vectors) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return partial_tile_of<Weights, kVectors - 1>(rows, vectors);
  }
  return tile_of_rows<Weights, kVectors, true, lines_of<Weights>(kVectors)>(rows);
}

/// The tile function for a group of columns: a full one, which prefetches kLines lines with each step, or
/// `vectors` vectors, the last of which is partial.
template <class Weights, int kLines>
TileFunction tile_of(std::int64_t rows, std::int64_t vectors, bool full) {
  return full ? tile_of_rows<Weights, kTileVectors, false, kLines>(rows)
              : partial_tile_of<Weights>(rows, vectors);
}

/// The tile function for a number of rows of a panel of whole vectors. `lines` to prefetch with each step: 0,
/// 1, 2 or as many as a step has, at most kMostLines.
template <class Weights>
TileFunction streamed_tile_of(std::int64_t rows, std::int64_t lines) {
  if (lines == 0) return tile_of_rows<Weights, kTileVectors, false, 0>(rows);
  if (lines == 1) return tile_of_rows<Weights, kTileVectors, false, 1>(rows);
  if (lines == 2) return tile_of_rows<Weights, kTileVectors, false, 2>(rows);
  return tile_of_rows<Weights, kTileVectors, false, lines_of<Weights>(kTileVectors)>(rows);
}

/// Multiplies a few blocks of rows by a panel of one group of columns. All blocks use a part of k before the
/// next part is read, so that each part is read from memory once. The sums wait in `out`, so their order does
/// not change. Prefetches of the next part and of gemm.fetch are spread evenly, so that memory is always
/// busy.
template <class Weights>
void gemm_streamed(const PanelGemm& gemm, std::int64_t blocks) {
  using A = typename Weights::A;
  const std::int64_t row_bytes = gemm.call.width * Weights::kColumnBytes;
  const std::int64_t row_lines = row_bytes / kCacheLine;
  const std::int64_t steps = (gemm.call.k + Weights::kInterleave - 1) / Weights::kInterleave;
  constexpr std::int64_t kPart = Simd::kFetching.part_steps;
  const std::int64_t tiles = (steps + kPart - 1) / kPart * blocks;
  SpanFetcher others(gemm.fetch);
  const std::int64_t others_a_tile = (others.lines() + tiles - 1) / tiles;
  PanelGemm part = gemm;
  for (std::int64_t begin = 0; begin < steps; begin += kPart) {
    const std::int64_t count = std::min(kPart, steps - begin);
    part.call.a = static_cast<const A*>(gemm.call.a) + begin * Weights::kInterleave;
    part.call.panel = gemm.call.panel + begin * row_bytes;
    part.call.k = std::min(gemm.call.k - begin * Weights::kInterleave, count * Weights::kInterleave);
    const std::byte* next =
        begin + count < steps ? part.call.panel + count * row_bytes : gemm.call.next_panel;
    if (blocks == 1 && !Simd::kFetching.for_one_tile) next = nullptr;
    for (std::int64_t row = 0, block = 0; block < blocks; ++block) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, blocks - block);
      // Each block prefetches its share of a step's lines.
      const std::int64_t lines = next == nullptr ? 0
                                                 : (row_lines * (block + 1) + blocks - 1) / blocks -
                                                       (row_lines * block + blocks - 1) / blocks;
      others.fetch(others_a_tile);
      streamed_tile_of<Weights>(rows, lines)(part, row, 0, Simd::kLanes, begin > 0,
                                             {next, lines * kCacheLine});
      if (next != nullptr) next += count * lines * kCacheLine;
      row += rows;
    }
  }
}

/// True if a panel is one group of columns, each with a single sum, and all lines of its steps can be
/// prefetched.
template <class Weights>
inline constexpr bool kCanStream =
    kTileVectors * Simd::kLanes == kPanelColumns && chains_of(kTileVectors) == 1 &&
    kPanelColumns * Weights::kColumnBytes <= kMostLines * kCacheLine;

template <class Weights>
void gemm_panel(const PanelGemm& gemm) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  constexpr int kStreamLines = lines_of<Weights>(kTileVectors);
  constexpr int kNextLines = 2;
  const std::int64_t blocks = (gemm.call.rows + kTileRows - 1) / kTileRows;
  if constexpr (kCanStream<Weights>) {
    if (gemm.call.rows <= kStreamRows && gemm.call.width == kGroup && !gemm.accumulate) {
      gemm_streamed<Weights>(gemm, blocks);
      return;
    }
  }
  SpanFetcher others(gemm.fetch);
  others.fetch(others.lines());
  const std::int64_t row_bytes = gemm.call.width * Weights::kColumnBytes;
  const std::int64_t steps = (gemm.call.k + Weights::kInterleave - 1) / Weights::kInterleave;
  for (std::int64_t column = 0; column < gemm.call.width; column += kGroup) {
    const std::int64_t left = gemm.call.width - column;
    const bool full = left >= kGroup;
    const std::int64_t vectors = full ? kTileVectors : (left + Simd::kLanes - 1) / Simd::kLanes;
    const std::int64_t last_lanes = left - (vectors - 1) * Simd::kLanes;
    if (blocks == 1 && !gemm.accumulate) {
      const Prefetch prefetch{gemm.call.panel + column * Weights::kColumnBytes + kStreamAhead, row_bytes};
      tile_of<Weights, kStreamLines>(gemm.call.rows, vectors, full)(gemm, 0, column, last_lanes, false,
                                                                    prefetch);
      continue;
    }
    // Blocks of rows are as even as possible; each prefetches its share of the next panel.
    const std::byte* next = column == 0 ? gemm.call.next_panel : nullptr;
    const std::int64_t share = (row_bytes + blocks - 1) / blocks;
    for (std::int64_t row = 0, block = 0; block < blocks; ++block) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, blocks - block);
      const Prefetch prefetch = next != nullptr ? Prefetch{next + block * steps * share, share}
                                                : Prefetch{static_cast<const std::byte*>(gemm.call.a), 0};
      tile_of<Weights, kNextLines>(rows, vectors, full)(gemm, row, column, last_lanes, false, prefetch);
      row += rows;
    }
  }
}

}  // namespace
}  // namespace adaptrt
