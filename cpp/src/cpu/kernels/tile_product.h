#pragma once

// Products on tile registers: the part that all kinds of weights and attention share. Included after
// simd_*.h, gemm.h and a header with Tiles.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "gemm.h"
#include "step_prefetch.h"
#include "tile_dots.h"

namespace adaptrt {
namespace {

/// Number of lines of a tile, and bytes of each line: a step of k, which is 32 bfloat16 or 64 int8.
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

/// Whole steps of rows, as tiles load them: the bytes of row r in step s are at data + r * row + s * step.
struct TileRows {
  const std::byte* data = nullptr;
  std::int64_t row = 0;
  std::int64_t step = 0;
};

/// Whole steps of weights: line l of step s is at step_at(s) + l * line, with four bytes a column.
struct TileColumns {
  const std::byte* data = nullptr;
  std::int64_t line = 0;
  std::int64_t step = 0;
  /// Mask for steps in a ring of places: their number, a power of two, minus one. -1: no ring.
  std::int64_t last_place = -1;
  std::int64_t first_place = 0;  ///< place of step 0

  [[nodiscard]] const std::byte* step_at(std::int64_t s) const {
    return data + ((first_place + s) & last_place) * step;
  }
};

/// Place for sums of four bytes each, with `stride` elements between rows.
struct TileSums {
  float* data = nullptr;
  std::int64_t stride = 0;
  /// True: add to the sums that are stored there.
  bool continues = false;
};

// A StepHook runs during products, for example to prefetch: at_step() is called with each step of a product
// of tiles, and at_lines<kLines>() with each kLines lines of columns that are loaded.

/// Multiplies two tiles of rows by two tiles of columns: four products for four loads. Rows come from the
/// second-level cache, and do not evict the columns from the first-level cache. `after_loads(s)` is called
/// when the columns of step s have been loaded.
template <class Dot, class StepHook, class AfterLoads>
inline void multiply_2x2(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, StepHook* hook,
                         const AfterLoads& after_loads) {
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
    hook->at_step();
    hook->template at_lines<static_cast<int>(2 * kTileHeight)>();
    Tiles::load_once<4>(first, a.row);
    Tiles::load<6>(columns, b.line);
    Dot::template add<0, 4, 6>();
    Tiles::load<7>(columns + kTileLine, b.line);
    Dot::template add<1, 4, 7>();
    Tiles::load_once<5>(second, a.row);
    after_loads(s);
    Dot::template add<2, 5, 6>();
    Dot::template add<3, 5, 7>();
  }
  Tiles::store<0>(sums.data, sums_row);
  Tiles::store<1>(sums.data + kTileColumns, sums_row);
  Tiles::store<2>(below, sums_row);
  Tiles::store<3>(below + kTileColumns, sums_row);
}

/// Multiplies one tile of rows by kColumns tiles of columns, at most four.
template <class Dot, int kColumns, class StepHook>
inline void multiply_1xn(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, StepHook* hook) {
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
    const std::byte* columns = b.step_at(s);
    hook->at_step();
    Tiles::load<4>(a.data + s * a.step, a.row);
    of_columns([&](auto column) __attribute__((always_inline)) {
      constexpr int kWeights = 5 + column() % 3;
      Tiles::load<kWeights>(columns + column() * kTileLine, b.line);
      hook->template at_lines<static_cast<int>(kTileHeight)>();
      Dot::template add<column(), 4, kWeights>();
    });
  }
  of_columns([&](auto column) __attribute__((always_inline)) {
    Tiles::store<column()>(sums.data + column() * kTileColumns, sums_row);
  });
}

template <class Dot, class StepHook>
inline void multiply_1x(std::int64_t columns, TileRows a, TileColumns b, std::int64_t steps, TileSums sums,
                        StepHook* hook) {
  switch (columns) {
    case 1:
      return multiply_1xn<Dot, 1>(a, b, steps, sums, hook);
    case 2:
      return multiply_1xn<Dot, 2>(a, b, steps, sums, hook);
    case 3:
      return multiply_1xn<Dot, 3>(a, b, steps, sums, hook);
    default:
      return multiply_1xn<Dot, 4>(a, b, steps, sums, hook);
  }
}

/// Calls multiply(to) with a place for whole tiles of sums, kRows x kColumns. `sums` has only `rows` x
/// `columns` elements; nothing outside of these is read or written.
template <std::int64_t kRows, std::int64_t kColumns, class Multiply>
inline void with_whole_tiles(TileSums sums, std::int64_t rows, std::int64_t columns,
                             const Multiply& multiply) {
  alignas(kCacheLine) float space[kRows * kColumns];
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * sizeof(float);
  for (std::int64_t r = 0; r < rows && sums.continues; ++r) {
    std::memcpy(space + r * kColumns, sums.data + r * sums.stride, row_bytes);
  }
  multiply(TileSums{space, kColumns, sums.continues});
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(sums.data + r * sums.stride, space + r * kColumns, row_bytes);
  }
}

/// Multiplies one tile of rows, of which only `rows` have sums, by `columns` columns, at most kPanelColumns.
template <class Dot, class StepHook>
inline void multiply_partly(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, std::int64_t rows,
                            std::int64_t columns, StepHook* hook) {
  with_whole_tiles<kTileHeight, kPanelColumns>(sums, rows, columns, [&](TileSums to) {
    multiply_1x<Dot>((columns + kTileColumns - 1) / kTileColumns, a, b, steps, to, hook);
  });
}

/// Columns of two tiles, and the bytes of their lines.
inline constexpr std::int64_t kPairColumns = 2 * kTileColumns;
inline constexpr std::int64_t kPairLine = 2 * kTileLine;
inline constexpr std::int64_t kPairStepBytes = kTileHeight * kPairLine;
/// Minimum number of rows for which copying two tiles of columns is faster.
inline constexpr std::int64_t kCopiedRows = 128;
/// Steps that are copied at once: 32 KB, two thirds of a first-level cache.
inline constexpr std::int64_t kCopiedSteps = 16;

/// Two tiles of columns, copied so that their lines are consecutive. In a panel they are in every other pair
/// of cache lines, which can use only half of the first-level cache's sets.
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

/// Multiplies `rows` rows, a multiple of two tiles, by two tiles of columns.
template <class Dot, class StepHook>
inline void multiply_pair(TileRows a, TileColumns pair, std::int64_t steps, TileSums sums, std::int64_t rows,
                          StepHook* hook) {
  for (std::int64_t row = 0; row < rows; row += 2 * kTileHeight) {
    multiply_2x2<Dot>({a.data + row * a.row, a.row, a.step}, pair, steps,
                      {sums.data + row * sums.stride, sums.stride, sums.continues}, hook,
                      [](std::int64_t) {});
  }
}

/// Multiplies `rows` rows, at most two tiles, by two tiles of columns.
template <class Dot, class StepHook>
inline void multiply_rest(TileRows a, TileColumns pair, std::int64_t steps, TileSums sums, std::int64_t rows,
                          StepHook* hook) {
  const auto multiply = [&](TileSums to) {
    if (rows > kTileHeight) {
      multiply_2x2<Dot>(a, pair, steps, to, hook, [](std::int64_t) {});
    } else {
      multiply_1xn<Dot, 2>(a, pair, steps, to, hook);
    }
  };
  if (rows % kTileHeight == 0) {
    multiply(sums);
  } else {
    with_whole_tiles<2 * kTileHeight, kPairColumns>(sums, rows, kPairColumns, multiply);
  }
}

/// Multiplies `rows` rows, at least two tiles, by columns that are a multiple of two tiles. The columns are
/// copied, one pair of tiles at a time. While the last whole tiles of rows are multiplied by a pair, each
/// step is overwritten by the next pair as soon as it has been loaded. So copying and products overlap.
template <class Dot, class StepHook>
inline void multiply_copied(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, std::int64_t rows,
                            std::int64_t columns, StepHook* hook) {
  struct Pair {
    std::int64_t first;  ///< number of the first step
    std::int64_t column;
  };
  const auto columns_of = [&](Pair pair) {
    return TileColumns{b.data + pair.first * b.step + pair.column * 4, b.line, b.step};
  };
  const auto steps_of_pair = [&](Pair pair) { return std::min(kCopiedSteps, steps - pair.first); };
  const auto following = [&](Pair pair) {
    pair.column += kPairColumns;
    return pair.column < columns ? pair : Pair{pair.first + kCopiedSteps, 0};
  };
  const std::int64_t rest = rows % (2 * kTileHeight);
  const std::int64_t last_row = rows - rest - 2 * kTileHeight;
  CopiedPair copied;
  for (std::int64_t s = 0; s < steps_of_pair({0, 0}); ++s) copied.copy(b, s);
  for (Pair pair{0, 0}; pair.first < steps; pair = following(pair)) {
    const auto rows_from = [&](std::int64_t row) {
      return TileRows{a.data + pair.first * a.step + row * a.row, a.row, a.step};
    };
    const auto sums_from = [&](std::int64_t row) {
      return TileSums{sums.data + row * sums.stride + pair.column, sums.stride,
                      sums.continues || pair.first > 0};
    };
    const std::int64_t count = steps_of_pair(pair);
    multiply_pair<Dot>(rows_from(0), copied.columns(), count, sums_from(0), last_row, hook);
    if (rest > 0) {
      multiply_rest<Dot>(rows_from(rows - rest), copied.columns(), count, sums_from(rows - rest), rest, hook);
    }
    const Pair next = following(pair);
    const std::int64_t wanted = next.first < steps ? steps_of_pair(next) : 0;  // at most `count`
    const TileColumns from = columns_of(next);
    multiply_2x2<Dot>(rows_from(last_row), copied.columns(), count, sums_from(last_row), hook,
                      [&](std::int64_t s) {
                        if (s < wanted) copied.copy(from, s);
                      });
  }
}

/// Order in which multiply_steps processes its rows.
struct RowPlan {
  /// True if columns are copied; all rows are multiplied by the copies.
  bool copies;
  /// Number of rows that are multiplied two tiles at a time by two tiles of columns; the last tiles may be
  /// partial. The rows after them are multiplied one tile at a time.
  std::int64_t paired;
};

inline RowPlan plan_rows(std::int64_t rows, std::int64_t columns) {
  if (columns % kPairColumns != 0) return {false, 0};
  // The lines of a single pair of tiles are consecutive already.
  const bool copies = rows >= kCopiedRows && columns > kPairColumns;
  const std::int64_t rest = rows % (2 * kTileHeight);
  return {copies, copies || rest > kTileHeight ? rows : rows - rest};
}

/// sums [rows, columns] = a [rows] * b, or += if the sums continue. `a` has whole tiles of rows, `b` whole
/// tiles of columns; at most kPanelColumns columns. The order of an element's sum depends only on its steps.
template <class Dot, class StepHook>
inline void multiply_steps(TileRows a, TileColumns b, std::int64_t steps, TileSums sums, std::int64_t rows,
                           std::int64_t columns, StepHook* hook) {
  const RowPlan plan = plan_rows(rows, columns);
  if (plan.copies) {
    multiply_copied<Dot>(a, b, steps, sums, rows, columns, hook);
    return;
  }
  const auto rows_from = [&](std::int64_t row) { return TileRows{a.data + row * a.row, a.row, a.step}; };
  const auto sums_from = [&](std::int64_t row) {
    return TileSums{sums.data + row * sums.stride, sums.stride, sums.continues};
  };
  const std::int64_t last = plan.paired % (2 * kTileHeight);
  const std::int64_t whole = plan.paired - last;
  for (std::int64_t column = 0; plan.paired > 0 && column < columns; column += kPairColumns) {
    const TileColumns pair{b.data + column * 4, b.line, b.step};
    const auto columns_from = [&](std::int64_t row) {
      return TileSums{sums_from(row).data + column, sums.stride, sums.continues};
    };
    multiply_pair<Dot>(a, pair, steps, columns_from(0), whole, hook);
    if (last > 0) multiply_rest<Dot>(rows_from(whole), pair, steps, columns_from(whole), last, hook);
  }
  for (std::int64_t row = plan.paired; row < rows; row += kTileHeight) {
    const std::int64_t count = std::min(kTileHeight, rows - row);
    if (count == kTileHeight && columns % kTileColumns == 0) {
      multiply_1x<Dot>(columns / kTileColumns, rows_from(row), b, steps, sums_from(row), hook);
    } else {
      multiply_partly<Dot>(rows_from(row), b, steps, sums_from(row), count, columns, hook);
    }
  }
}

/// Number of steps of tiles in multiply_steps for `rows` rows.
inline std::int64_t steps_taken(std::int64_t rows, std::int64_t columns, std::int64_t steps) {
  const RowPlan plan = plan_rows(rows, columns);
  const std::int64_t pairs = (plan.paired + 2 * kTileHeight - 1) / (2 * kTileHeight);
  const std::int64_t singles = (rows - plan.paired + kTileHeight - 1) / kTileHeight;
  return (pairs * (columns / kPairColumns) + singles) * steps;
}

/// See KernelTable::pack_rows. The lines of a tile in one step are consecutive, so they are written before
/// those of the next step, which is far away.
inline void pack_steps(const SourceRows& source, std::int64_t rows, std::byte* out, std::int64_t step_bytes) {
  const std::int64_t whole = source.bytes / kTileLine * kTileLine;
  const std::int64_t rest = source.bytes - whole;
  for (std::int64_t first = 0; first < rows; first += kTileHeight, out += kTileHeight * kTileLine) {
    const std::int64_t count = std::min(kTileHeight, rows - first);
    const std::byte* from[kTileHeight];
    for (std::int64_t r = 0; r < count; ++r) from[r] = source.row(first + r);
    std::byte* step = out;
    for (std::int64_t at = 0; at < source.bytes; at += kTileLine, step += step_bytes) {
      for (std::int64_t r = 0; at < whole && r < count; ++r) {
        std::memcpy(step + r * kTileLine, from[r] + at, kTileLine);
      }
      for (std::int64_t r = 0; at == whole && r < count; ++r) {
        std::memset(step + r * kTileLine, 0, kTileLine);
        std::memcpy(step + r * kTileLine, from[r] + at, static_cast<std::size_t>(rest));
      }
      if (count < kTileHeight) std::memset(step + count * kTileLine, 0, (kTileHeight - count) * kTileLine);
    }
  }
}

/// Copies `lines` lines of a panel with `columns` columns to one step. Pads columns and lines with zeros.
inline void pad_step(const std::byte* from, std::int64_t lines, std::int64_t columns, std::byte* out) {
  std::memset(out, 0, kStepBytes);
  const std::size_t line_bytes = static_cast<std::size_t>(columns) * 4;
  for (std::int64_t line = 0; line < lines; ++line) {
    std::memcpy(out + line * kStepLine, from + static_cast<std::size_t>(line) * line_bytes, line_bytes);
  }
}

}  // namespace
}  // namespace adaptrt
