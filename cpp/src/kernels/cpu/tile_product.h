#pragma once

// Products on tile registers: what all kinds of weights and attention share. Included behind simd_*.h, gemm.h
// and a header with Tiles.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "adaptrt/core/panels.h"
#include "adaptrt/kernels/kernel_table.h"
#include "gemm.h"
#include "tile_dots.h"

namespace adaptrt {
namespace {

/// Lines of a tile, and the bytes of each: 32 bfloat16 or 64 int8, which is what a step takes of k.
inline constexpr std::int64_t kTileHeight = 16;
inline constexpr std::int64_t kTileLine = 64;
static_assert(PackedSteps::kBlockRows == kTileHeight && PackedSteps::kRowBytes == kTileLine,
              "tiles are loaded from packed rows as they lie");
/// Columns of a tile of weights or sums.
inline constexpr std::int64_t kTileColumns = 16;
/// Inputs of a step of bfloat16.
inline constexpr std::int64_t kStepInputs = 32;
/// A step of a panel of kPanelColumns: sixteen lines of pairs or fours for each column.
inline constexpr std::int64_t kStepLine = kPanelColumns * 4;
inline constexpr std::int64_t kStepBytes = kTileHeight * kStepLine;

/// Whole steps of rows that tiles are loaded from: row r's bytes of step s are at data + r * row + s * step.
struct TileRows {
  const std::byte* data = nullptr;
  std::int64_t row = 0;
  std::int64_t step = 0;
};

/// Whole steps of weights: line l of step s is at data + s * step + l * line, with four bytes a column.
struct TileColumns {
  const std::byte* data = nullptr;
  std::int64_t line = 0;
  std::int64_t step = 0;
};

/// Where sums wait: four bytes each, `stride` elements between rows.
struct TileSums {
  float* data = nullptr;
  std::int64_t stride = 0;
  /// The sums go on from what is there.
  bool continues = false;
};

/// What is prefetched while steps are multiplied, a little at a time.
class StepPrefetch {
 public:
  /// Nothing.
  StepPrefetch() = default;

  /// Of many rows, of which each panel is multiplied for long: `bytes` from `next` on to the second-level
  /// cache while `steps` steps are taken.
  static StepPrefetch spread(const std::byte* next, std::int64_t bytes, std::int64_t steps) {
    StepPrefetch prefetch;
    if (next == nullptr || steps == 0) return prefetch;
    prefetch.spread_ = next;
    prefetch.spread_lines_ = (bytes / kCacheLine + steps - 1) / steps;
    return prefetch;
  }

  /// Of few rows, which memory is the limit of: the panel [begin, begin + bytes) is read `ahead` bytes ahead
  /// to the first-level cache. `next`, unless it is nullptr, is read in two halves to the second-level cache
  /// meanwhile: memory gives more to several places than to one.
  static StepPrefetch stream(const std::byte* begin, std::int64_t bytes, std::int64_t ahead,
                             const std::byte* next) {
    StepPrefetch prefetch;
    prefetch.near_ = begin + ahead;
    prefetch.near_lines_ = bytes / kCacheLine;
    prefetch.halves_[0] = next;
    prefetch.halves_[1] = next == nullptr ? nullptr : next + bytes / 2;
    return prefetch;
  }

  /// Fetches what else is wanted, `lines` with each step.
  void add_others(SpanFetcher* others, std::int64_t lines) {
    others_ = others;
    others_lines_ = lines;
  }

  /// With each kLines lines of a streamed panel.
  template <int kLines>
  void fetch_lines() {
    if (near_lines_ <= 0) return;
    ADAPTRT_UNROLL
    for (int line = 0; line < kLines; ++line) {
      if (kLines < kHintedLines || is_hint(line)) __builtin_prefetch(near_ + line * kCacheLine, 0, 3);
    }
    near_ += kLines * kCacheLine;
    near_lines_ -= kLines;
    if (halves_[0] == nullptr) return;
    for (const std::byte*& half : halves_) {
      ADAPTRT_UNROLL
      for (int line = 0; line < kLines / 2; ++line) __builtin_prefetch(half + line * kCacheLine, 0, 2);
      half += kLines / 2 * kCacheLine;
    }
  }

  /// With each step.
  void fetch_step() {
    if (others_ != nullptr) others_->fetch(others_lines_);
    for (std::int64_t line = 0; line < spread_lines_; ++line, spread_ += kCacheLine) {
      const auto number = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(spread_) / kCacheLine);
      if (spread_lines_ < kManyLines || is_hint(number)) __builtin_prefetch(spread_, 0, 2);
    }
  }

 private:
  /// Where many lines are wanted, two of eight are fetched, for which the second-level cache's own prefetcher
  /// fetches the others: it does not take the few places through which tiles are loaded.
  static constexpr std::int64_t kHintedLines = 8;
  static constexpr bool is_hint(std::int64_t line) { return line % kHintedLines < 2; }
  /// Of a step.
  static constexpr std::int64_t kManyLines = 4;

  const std::byte* spread_ = nullptr;
  std::int64_t spread_lines_ = 0;  ///< a step
  const std::byte* near_ = nullptr;
  std::int64_t near_lines_ = 0;  ///< left
  const std::byte* halves_[2] = {nullptr, nullptr};
  SpanFetcher* others_ = nullptr;
  std::int64_t others_lines_ = 0;
};

template <int kLines>
inline void prefetch_lines(StepPrefetch* prefetch) {
  if constexpr (kLines > 0) prefetch->fetch_lines<kLines>();
}

/// Sums of two tiles of rows and two of columns: four products for four loads. Rows come from the
/// second-level cache and leave the columns where they are, in the first. `behind_loads(s)` is called when
/// the columns of step s have been loaded.
template <class Dot, class BehindLoads>
inline void multiply_2x2(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, StepPrefetch* prefetch,
                         const BehindLoads& behind_loads) {
  const std::int64_t sums_row = sums.stride * 4;
  float* below = sums.data + kTileHeight * sums.stride;
  if (sums.continues) {
    Tiles::load<0>(sums.data, sums_row);
    Tiles::load<1>(sums.data + kTileColumns, sums_row);
    Tiles::load<2>(below, sums_row);
    Tiles::load<3>(below + kTileColumns, sums_row);
  } else {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    const std::byte* first = a.data + s * a.step;
    const std::byte* second = first + kTileHeight * a.row;
    const std::byte* columns = b.data + s * b.step;
    prefetch->fetch_step();
    prefetch->fetch_lines<static_cast<int>(2 * kTileHeight)>();
    Tiles::load_once<4>(first, a.row);
    Tiles::load<6>(columns, b.line);
    Dot::template add<0, 4, 6>();
    Tiles::load<7>(columns + kTileLine, b.line);
    Dot::template add<1, 4, 7>();
    Tiles::load_once<5>(second, a.row);
    behind_loads(s);
    Dot::template add<2, 5, 6>();
    Dot::template add<3, 5, 7>();
  }
  Tiles::store<0>(sums.data, sums_row);
  Tiles::store<1>(sums.data + kTileColumns, sums_row);
  Tiles::store<2>(below, sums_row);
  Tiles::store<3>(below + kTileColumns, sums_row);
}

/// Sums of one tile of rows and kColumns tiles of columns, at most four.
template <class Dot, int kColumns>
inline void multiply_1xn(TileRows a, TileColumns b, std::int64_t steps, TileSums sums,
                         StepPrefetch* prefetch) {
  const std::int64_t sums_row = sums.stride * 4;
  const auto of_columns = [&](auto body) __attribute__((always_inline)) {
    [&]<int... kColumn>(std::integer_sequence<int, kColumn...>) __attribute__((always_inline)) {
      (body(std::integral_constant<int, kColumn>()), ...);
    }(std::make_integer_sequence<int, kColumns>());
  };
  of_columns([&](auto column) __attribute__((always_inline)) {
    if (sums.continues) {
      Tiles::load<column()>(sums.data + column() * kTileColumns, sums_row);
    } else {
      Tiles::zero<column()>();
    }
  });
  for (std::int64_t s = 0; s < steps; ++s) {
    const std::byte* columns = b.data + s * b.step;
    prefetch->fetch_step();
    Tiles::load<4>(a.data + s * a.step, a.row);
    of_columns([&](auto column) __attribute__((always_inline)) {
      constexpr int kWeights = 5 + column() % 3;
      Tiles::load<kWeights>(columns + column() * kTileLine, b.line);
      prefetch->fetch_lines<static_cast<int>(kTileHeight)>();
      Dot::template add<column(), 4, kWeights>();
    });
  }
  of_columns([&](auto column) __attribute__((always_inline)) {
    Tiles::store<column()>(sums.data + column() * kTileColumns, sums_row);
  });
}

template <class Dot>
inline void multiply_1x(std::int64_t columns, TileRows a, TileColumns b, std::int64_t steps, TileSums sums,
                        StepPrefetch* prefetch) {
  switch (columns) {
    case 1:
      return multiply_1xn<Dot, 1>(a, b, steps, sums, prefetch);
    case 2:
      return multiply_1xn<Dot, 2>(a, b, steps, sums, prefetch);
    case 3:
      return multiply_1xn<Dot, 3>(a, b, steps, sums, prefetch);
    default:
      return multiply_1xn<Dot, 4>(a, b, steps, sums, prefetch);
  }
}

/// One tile of rows, `rows` of which have sums, times `columns` columns, at most kPanelColumns. Sums that are
/// not there are not touched.
template <class Dot>
inline void multiply_partly(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, std::int64_t rows,
                            std::int64_t columns, StepPrefetch* prefetch) {
  alignas(kCacheLine) float space[kTileHeight * kPanelColumns];
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * sizeof(float);
  if (sums.continues) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(space + r * kPanelColumns, sums.data + r * sums.stride, row_bytes);
    }
  }
  multiply_1x<Dot>((columns + kTileColumns - 1) / kTileColumns, a, b, steps,
                   {space, kPanelColumns, sums.continues}, prefetch);
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(sums.data + r * sums.stride, space + r * kPanelColumns, row_bytes);
  }
}

/// Rows that are multiplied two tiles at a time, with two tiles of columns.
inline std::int64_t paired_rows(std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kPairRows = 2 * kTileHeight;
  return columns % (2 * kTileColumns) == 0 ? rows / kPairRows * kPairRows : 0;
}

/// Columns of two tiles, and the bytes of their lines.
inline constexpr std::int64_t kPairColumns = 2 * kTileColumns;
inline constexpr std::int64_t kPairLine = 2 * kTileLine;
/// Rows from which on copying two tiles of columns is worth its time.
inline constexpr std::int64_t kCopiedRows = 96;
/// Steps that are copied at once: 32 KB, two thirds of a first-level cache.
inline constexpr std::int64_t kCopiedSteps = 16;

/// Two tiles of columns, copied to where one line follows the other. As a panel has them, they lie in every
/// other pair of cache lines, and half of the first-level cache is all that can hold them.
class CopiedPair {
 public:
  /// Copies step `s` of at most kCopiedSteps.
  void copy(TileColumns from, std::int64_t s) {
    const std::byte* step = from.data + s * from.step;
    std::byte* to = lines_ + s * kStepOfPair;
    for (std::int64_t line = 0; line < kTileHeight; ++line, to += kPairLine) {
      std::memcpy(to, step + line * from.line, kPairLine);
    }
  }

  [[nodiscard]] TileColumns columns() const { return {lines_, kPairLine, kStepOfPair}; }

 private:
  static constexpr std::int64_t kStepOfPair = kTileHeight * kPairLine;
  alignas(kCacheLine) std::byte lines_[kCopiedSteps * kStepOfPair];
};

/// The sums of `rows` rows, a multiple of two tiles of them, and of two tiles of columns.
template <class Dot>
inline void multiply_pair(TileRows a, TileColumns pair, std::int64_t steps, TileSums sums, std::int64_t rows,
                          StepPrefetch* prefetch) {
  for (std::int64_t row = 0; row < rows; row += 2 * kTileHeight) {
    multiply_2x2<Dot>({a.data + row * a.row, a.row, a.step}, pair, steps,
                      {sums.data + row * sums.stride, sums.stride, sums.continues}, prefetch,
                      [](std::int64_t) {});
  }
}

/// The sums of `rows` rows, a multiple of two tiles of them, and of as many columns, which are copied, a pair
/// of tiles after the other. While the last rows are multiplied by a pair, each of its steps is overwritten
/// by the next pair's as soon as it was loaded: the copying goes on beside the products.
template <class Dot>
inline void multiply_copied(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, std::int64_t rows,
                            std::int64_t columns, StepPrefetch* prefetch) {
  struct Pair {
    std::int64_t first;  ///< step
    std::int64_t column;
  };
  const auto columns_of = [&](Pair pair) {
    return TileColumns{b.data + pair.first * b.step + pair.column * 4, b.line, b.step};
  };
  const auto steps_of_pair = [&](Pair pair) { return std::min(kCopiedSteps, steps - pair.first); };
  const auto behind = [&](Pair pair) {
    pair.column += kPairColumns;
    return pair.column < columns ? pair : Pair{pair.first + kCopiedSteps, 0};
  };
  const std::int64_t last_row = rows - 2 * kTileHeight;
  CopiedPair copied;
  for (std::int64_t s = 0; s < steps_of_pair({0, 0}); ++s) copied.copy(b, s);
  for (Pair pair{0, 0}; pair.first < steps; pair = behind(pair)) {
    const TileRows rows_of{a.data + pair.first * a.step, a.row, a.step};
    const TileSums to{sums.data + pair.column, sums.stride, sums.continues || pair.first > 0};
    const std::int64_t count = steps_of_pair(pair);
    multiply_pair<Dot>(rows_of, copied.columns(), count, to, last_row, prefetch);
    const Pair next = behind(pair);
    const std::int64_t wanted = next.first < steps ? steps_of_pair(next) : 0;  // never more than `count`
    const TileColumns from = columns_of(next);
    multiply_2x2<Dot>({rows_of.data + last_row * a.row, a.row, a.step}, copied.columns(), count,
                      {to.data + last_row * to.stride, to.stride, to.continues}, prefetch,
                      [&](std::int64_t s) {
                        if (s < wanted) copied.copy(from, s);
                      });
  }
}

/// The sums of `rows` rows, a multiple of two tiles of them, and of as many columns.
template <class Dot>
inline void multiply_paired(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, std::int64_t rows,
                            std::int64_t columns, StepPrefetch* prefetch) {
  if (rows >= kCopiedRows) {
    multiply_copied<Dot>(a, b, steps, sums, rows, columns, prefetch);
    return;
  }
  for (std::int64_t column = 0; column < columns; column += kPairColumns) {
    multiply_pair<Dot>(a, {b.data + column * 4, b.line, b.step}, steps,
                       {sums.data + column, sums.stride, sums.continues}, rows, prefetch);
  }
}

/// sums [rows, columns] = a [rows] * b, or += where they continue. `a` has whole tiles of rows, `b` whole
/// tiles of columns; at most kPanelColumns columns. The order of an element's sum depends on its steps alone.
template <class Dot>
inline void multiply_steps(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, std::int64_t rows,
                           std::int64_t columns, StepPrefetch* prefetch) {
  const std::int64_t paired = paired_rows(rows, columns);
  if (paired > 0) multiply_paired<Dot>(a, b, steps, sums, paired, columns, prefetch);
  for (std::int64_t row = paired; row < rows; row += kTileHeight) {
    const std::int64_t count = std::min(kTileHeight, rows - row);
    const TileRows of_row{a.data + row * a.row, a.row, a.step};
    const TileSums to{sums.data + row * sums.stride, sums.stride, sums.continues};
    if (count == kTileHeight && columns % kTileColumns == 0) {
      multiply_1x<Dot>(columns / kTileColumns, of_row, b, steps, to, prefetch);
    } else {
      multiply_partly<Dot>(of_row, b, steps, to, count, columns, prefetch);
    }
  }
}

/// How often multiply_steps takes a step of `rows` rows.
inline std::int64_t steps_taken(std::int64_t rows, std::int64_t columns, std::int64_t steps) {
  const std::int64_t paired = paired_rows(rows, columns);
  const std::int64_t blocks = paired / (2 * kTileHeight) * (columns / (2 * kTileColumns));
  const std::int64_t single = (rows - paired + kTileHeight - 1) / kTileHeight;
  return (blocks + single) * steps;
}

/// Copies `bytes` of each of `rows` rows into steps, zeros behind them and below them up to whole tiles.
inline void pack_steps(const std::byte* from, std::int64_t stride, std::int64_t rows, std::int64_t bytes,
                       std::byte* out, std::int64_t step_bytes) {
  const std::int64_t steps = (bytes + kTileLine - 1) / kTileLine;
  const std::int64_t padded = (rows + kTileHeight - 1) / kTileHeight * kTileHeight;
  for (std::int64_t r = 0; r < padded; ++r) {
    std::byte* to = out + r * kTileLine;
    for (std::int64_t s = 0; s < steps; ++s, to += step_bytes) {
      const std::int64_t there = r < rows ? std::clamp<std::int64_t>(bytes - s * kTileLine, 0, kTileLine) : 0;
      if (there == kTileLine) {
        std::memcpy(to, from + r * stride + s * kTileLine, kTileLine);
        continue;
      }
      std::memset(to, 0, kTileLine);
      if (there > 0) std::memcpy(to, from + r * stride + s * kTileLine, static_cast<std::size_t>(there));
    }
  }
}

/// Copies `lines` lines of a panel of `columns` columns into one step, zeros beside and below them.
inline void pad_step(const std::byte* from, std::int64_t lines, std::int64_t columns, std::byte* out) {
  std::memset(out, 0, kStepBytes);
  const std::size_t line_bytes = static_cast<std::size_t>(columns) * 4;
  for (std::int64_t line = 0; line < lines; ++line) {
    std::memcpy(out + line * kStepLine, from + static_cast<std::size_t>(line) * line_bytes, line_bytes);
  }
}

}  // namespace
}  // namespace adaptrt
