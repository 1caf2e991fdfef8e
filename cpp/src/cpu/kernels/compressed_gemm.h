#pragma once

// Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "gemm.h"

namespace adaptrt {
namespace {

inline constexpr int kPiecesAcross = static_cast<int>(kPanelColumns / kPieceOutputs);
inline constexpr int kPiecePairs = static_cast<int>(kPieceInputs / 2);
inline constexpr std::int64_t kPairBytes = 4;
inline constexpr std::int64_t kPairRowBytes = kPanelColumns * kPairBytes;
/// Bytes of a row of pieces as bfloat16.
inline constexpr std::int64_t kPieceRowPairBytes = kPiecePairs * kPairRowBytes;
/// Cache lines of a piece.
inline constexpr int kPieceLines = static_cast<int>(kCompressedPieceBytes / kCacheLine);
/// Bytes of a row of pieces. All pieces of a row hold the same inputs.
inline constexpr std::int64_t kPieceRowBytes = kPiecesAcross * kCompressedPieceBytes;

/// Expands a compressed panel to bfloat16, some inputs at a time.
class PanelExpander {
 public:
  PanelExpander(const std::byte* panel, std::int64_t outliers)
      : panel_(parts_of_compressed(panel, outliers)), pieces_(panel_) {
    find_outlier();
  }

  [[nodiscard]] const PieceExpander& pieces() const { return pieces_; }
  /// Address of a row of pieces.
  [[nodiscard]] const std::byte* source(std::int64_t row) const {
    return panel_.pieces + row * kPieceRowBytes;
  }
  /// True if rows of pieces before `row` have outliers that expand() has not stored yet.
  [[nodiscard]] bool has_outliers(std::int64_t row) const { return place_ < row * kPieceRowElements; }

  /// Expands rows [begin, end) of pieces to `out` [inputs / 2][kPanelColumns][2]. Rows must be requested in
  /// ascending order.
  template <int kLines>
  void expand(std::int64_t begin, std::int64_t end, std::byte* out, Prefetch prefetch) {
    for (std::int64_t row = begin; row < end; ++row, out += kPieceRowPairBytes) {
      expand_row(
          row, [&](std::int64_t across) { return out + across * kPieceOutputs * kPairBytes; }, kPairRowBytes,
          [&](std::int64_t) { prefetch_lines<kLines>(&prefetch); });
    }
  }

  /// Expands one row of pieces. The pairs of piece `across` go to at(across), `stride` bytes apart; then
  /// after_piece(across) is called.
  template <class At, class AfterPiece>
  void expand_row(std::int64_t row, const At& at, std::int64_t stride, const AfterPiece& after_piece) {
    const std::byte* piece = source(row);
    ADAPTRT_UNROLL
    for (std::int64_t across = 0; across < kPiecesAcross; ++across) {
      pieces_.expand(piece, at(across), stride);
      after_piece(across);
      piece += kCompressedPieceBytes;
    }
    store_outliers(row * kPieceRowElements, [&](std::int64_t pair, std::int64_t column) {
      return at(column / kPieceOutputs) + pair * stride + column % kPieceOutputs * kPairBytes;
    });
  }

 private:
  static constexpr std::int64_t kPieceRowElements = kPieceInputs * kPanelColumns;

  /// Stores the outliers of a row of pieces, whose first element has number `first`, into the pairs of inputs
  /// at pair_at(pair, column). Places that are out of order are skipped.
  template <class PairAt>
  void store_outliers(std::int64_t first, const PairAt& pair_at) {
    constexpr std::int64_t kSize = sizeof(std::uint16_t);
    for (; place_ < first + kPieceRowElements; ++next_, find_outlier()) {
      if (place_ < first) continue;
      const std::int64_t pair = (place_ - first) / 2;
      std::byte* to = pair_at(pair / kPanelColumns, pair % kPanelColumns) + place_ % 2 * kSize;
      std::memcpy(to, panel_.bits + next_ * kSize, kSize);
    }
  }

  void find_outlier() {
    place_ = std::numeric_limits<std::int64_t>::max();
    if (next_ == panel_.count) return;
    std::uint32_t place = 0;
    std::memcpy(&place, panel_.places + next_ * static_cast<std::int64_t>(sizeof(place)), sizeof(place));
    place_ = place;
  }

  CompressedPanel panel_;
  PieceExpander pieces_;
  std::int64_t next_ = 0;  ///< number of the next outlier
  std::int64_t place_;     ///< number of its element in the panel; the maximum after the last outlier
};

/// Rows of pieces to multiply by the first tile of activations.
struct PieceRows {
  std::int64_t begin;
  std::int64_t end;
  /// Place to keep them as bfloat16 for the other tiles, [inputs / 2][kPanelColumns][2]; nullptr: they are
  /// not kept.
  std::byte* kept;
};

/// Maximum number of rows for which the pairs of a piece stay in registers until all rows are multiplied.
/// With more rows, it is faster to keep each value of `a` for all pieces of a row.
inline constexpr int kRegisterRows = 2;

/// out[kRows, kPanelColumns] = a * rows of pieces, or += after the first rows. gemm.call.a begins with the
/// first input of rows.begin.
template <class Weights, int kRows, int kLines>
void compressed_tile(const PanelGemm& gemm, PanelExpander* expander, PieceRows rows, const std::byte* next) {
  using A = typename Weights::A;
  using B = typename Weights::B;
  const PieceExpander pieces = expander->pieces();
  const A* a = static_cast<const A*>(gemm.call.a);
  const std::int64_t a_stride = gemm.call.a_stride;
  Prefetch prefetch{next, kLines * kCacheLine};
  Simd::Vec sums[kRows][kPiecesAcross];
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kPiecesAcross; ++v) {
      const float* before = gemm.call.out + r * gemm.call.out_stride + v * Simd::kLanes;
      sums[r][v] = rows.begin > 0 ? Simd::load(before) : Simd::zero();
    }
  }
  const auto take = [&](int pair, int v, B columns) __attribute__((always_inline)) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto value = Weights::broadcast(a + r * a_stride + 2 * pair);
      sums[r][v] = Weights::multiply_add(value, columns, sums[r][v]);
    }
  };
  alignas(kCacheLine) std::byte space[kPieceRowPairBytes];
  std::byte* expanded = rows.kept != nullptr ? rows.kept : space;
  const std::int64_t expanded_step = rows.kept != nullptr ? kPieceRowPairBytes : 0;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    if (kRows > kRegisterRows || expanded_step > 0 || expander->has_outliers(row + 1)) {
      expander->template expand<kLines>(row, row + 1, expanded, prefetch);
      prefetch.from += kPiecesAcross * prefetch.step;
      ADAPTRT_UNROLL
      for (int pair = 0; pair < kPiecePairs; ++pair) {
        B columns[kPiecesAcross];
        ADAPTRT_UNROLL
        for (int v = 0; v < kPiecesAcross; ++v) {
          columns[v] = Weights::load(expanded + pair * kPairRowBytes + v * kPieceOutputs * kPairBytes);
        }
        ADAPTRT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const auto value = Weights::broadcast(a + r * a_stride + 2 * pair);
          ADAPTRT_UNROLL
          for (int v = 0; v < kPiecesAcross; ++v) {
            sums[r][v] = Weights::multiply_add(value, columns[v], sums[r][v]);
          }
        }
      }
    } else {
      const std::byte* piece = expander->source(row);
      ADAPTRT_UNROLL
      for (int v = 0; v < kPiecesAcross; ++v) {
        B pairs[kPiecePairs];
        pieces.expand(piece + v * kCompressedPieceBytes, pairs);
        ADAPTRT_UNROLL
        for (int pair = 0; pair < kPiecePairs; ++pair) take(pair, v, pairs[pair]);
        prefetch_lines<kLines>(&prefetch);
      }
    }
    expanded += expanded_step;
    a += kPieceInputs;
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kPiecesAcross; ++v) {
      Simd::store(gemm.call.out + r * gemm.call.out_stride + v * Simd::kLanes, sums[r][v]);
    }
  }
}

using CompressedTile = void (*)(const PanelGemm&, PanelExpander*, PieceRows, const std::byte*);

/// The tile function for a number of rows, from 1 to kRows.
template <class Weights, int kLines, int kRows = kTileRows>
CompressedTile compressed_tile_of(std::int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return compressed_tile_of<Weights, kLines, kRows - 1>(rows);
  }
  return &compressed_tile<Weights, kRows, kLines>;
}

/// Like gemm_streamed: all tiles of rows are multiplied by a part of k before the next part is read, and
/// prefetch that part. The first tile expands the part to bfloat16; the others read it from the first-level
/// cache.
template <class Weights>
void compressed_gemm(const PanelGemm& gemm, std::int64_t outliers) {
  using A = typename Weights::A;
  constexpr std::int64_t kPartRows = kStreamSteps / kPiecePairs;
  alignas(kCacheLine) std::byte kept[kStreamSteps * kPairRowBytes];
  PanelExpander expander(gemm.call.panel, outliers);
  const std::int64_t tiles = (gemm.call.rows + kTileRows - 1) / kTileRows;
  const std::int64_t piece_rows = gemm.call.k / kPieceInputs;
  // Lines of a piece that the first tile prefetches; the other tiles prefetch the rest.
  const std::int64_t first_lines = tiles == 1 ? kPieceLines : tiles == 2 ? 2 : 1;
  const CompressedTile first_tile =
      first_lines == kPieceLines
          ? compressed_tile_of<Weights, kPieceLines>(rows_of_tile(gemm.call.rows, tiles))
      : first_lines == 2 ? compressed_tile_of<Weights, 2>(rows_of_tile(gemm.call.rows, tiles))
                         : compressed_tile_of<Weights, 1>(rows_of_tile(gemm.call.rows, tiles));
  SpanFetcher others(gemm.fetch);
  const std::int64_t parts = (piece_rows + kPartRows - 1) / kPartRows;
  const std::int64_t others_a_tile = (others.lines() + parts * tiles - 1) / (parts * tiles);
  PanelGemm part = gemm;
  for (std::int64_t begin = 0; begin < piece_rows; begin += kPartRows) {
    const std::int64_t end = std::min(begin + kPartRows, piece_rows);
    const std::byte* next = end < piece_rows ? expander.source(end) : gemm.call.next_panel;
    // There is nothing to prefetch; prefetching cached lines instead costs almost no time.
    if (next == nullptr) next = expander.source(begin);
    part.call.a = static_cast<const A*>(gemm.call.a) + begin * kPieceInputs;
    part.call.k = (end - begin) * kPieceInputs;
    part.call.panel = kept;
    others.fetch(others_a_tile);
    first_tile(part, &expander, {begin, end, tiles > 1 ? kept : nullptr}, next);
    next += (end - begin) * kPiecesAcross * first_lines * kCacheLine;
    std::int64_t row = rows_of_tile(gemm.call.rows, tiles);
    for (std::int64_t tile = 1; tile < tiles; ++tile) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, tiles - tile);
      // A tile has as many steps as pieces.
      const std::int64_t lines = tile < kPieceLines - first_lines + 1 ? 1 : 0;
      others.fetch(others_a_tile);
      streamed_tile_of<Weights>(rows, lines)(part, row, 0, Simd::kLanes, begin > 0,
                                             {next, lines * kCacheLine});
      next += (end - begin) * kPiecesAcross * lines * kCacheLine;
      row += rows;
    }
  }
}

using CompressedGemm = void (*)(const PanelGemm& gemm, std::int64_t outliers);

/// nullptr if panels are not streamed.
template <class Weights>
constexpr CompressedGemm compressed_gemm_of() {
  if constexpr (kCanStream<Weights>) return &compressed_gemm<Weights>;
  return nullptr;
}

inline void expand_compressed(const std::byte* panel, std::int64_t k, std::int64_t outliers, std::byte* out) {
  PanelExpander expander(panel, outliers);
  expander.expand<kPieceLines>(0, k / kPieceInputs, out,
                               {expander.source(0) + kStreamAhead, kCompressedPieceBytes});
}

}  // namespace
}  // namespace adaptrt
