#pragma once

// Products with panels of compressed matrices (core/compressed_matrix.h). Included after simd_*.h and gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/cpu/kernel_table.h"
#include "compressed_gemm.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Bytes ahead of their use at which pieces are prefetched.
inline constexpr std::int64_t kPiecesAhead = 3 * kStreamAhead / 4;

/// Prefetches the pieces that follow the ones in use.
class PiecesAhead {
 public:
  /// `next`: the pieces to prefetch after the panel's; nullptr for none.
  PiecesAhead(const MatrixPanel& panel, const std::byte* next)
      : ahead_(panel.pieces + kPiecesAhead),
        end_(panel.pieces + panel.num_pieces * kCompressedPieceBytes),
        next_(next == nullptr ? panel.pieces : next) {
    if (ahead_ >= end_) continue_with_next();
  }

  /// Must be called with each piece.
  void at_piece() {
    Prefetch lines{ahead_, 0};
    prefetch_lines<static_cast<int>(kCompressedPieceBytes / kCacheLine)>(&lines);
    ahead_ += kCompressedPieceBytes;
    if (ahead_ == end_) continue_with_next();
  }

 private:
  void continue_with_next() {
    end_ = nullptr;
    // Prefetching cached lines costs almost no time.
    ahead_ = next_;
  }

  const std::byte* ahead_;
  const std::byte* end_;
  const std::byte* next_;
};

/// Expands a panel's pieces one after another, and calls `ahead` with each.
template <class Ahead>
class PieceReader {
 public:
  PieceReader(const MatrixPanel& panel, Ahead ahead)
      : panel_(panel), expander_(CompressedPanel{.table = panel.table}), piece_(panel.pieces), ahead_(ahead) {
    find_outlier();
  }

  /// Expands the next piece to `out`, kPiecePanelBytes bytes.
  void expand(std::byte* out) {
    ahead_.at_piece();
    expander_.expand(piece_, out, kPieceVectorBytes);
    piece_ += kCompressedPieceBytes;
    for (; left_ < kPieceElements; ++outlier_, find_outlier()) {
      // Places that are out of order are skipped.
      if (left_ >= 0) std::memcpy(out + left_ * 2, panel_.bits + outlier_ * 2, sizeof(std::uint16_t));
    }
    left_ -= kPieceElements;
    first_ += kPieceElements;
  }

  /// Expands the next piece to vectors of words.
  template <class Words>
  void expand(Words (&words)[4]) {
    if (left_ < kPieceElements) {
      alignas(kCacheLine) std::byte out[kPiecePanelBytes];
      expand(out);
      ADAPTRT_UNROLL
      for (int vector = 0; vector < 4; ++vector) {
        std::memcpy(&words[vector], out + vector * kPieceVectorBytes, sizeof(Words));
      }
      return;
    }
    ahead_.at_piece();
    expander_.expand(piece_, words);
    piece_ += kCompressedPieceBytes;
    left_ -= kPieceElements;
    first_ += kPieceElements;
  }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max() / 2;

  /// Sets left_ to the distance of the next outlier from the next piece's first element.
  void find_outlier() {
    left_ = kNone;
    if (outlier_ == panel_.count) return;
    std::uint32_t place = 0;
    std::memcpy(&place, panel_.places + outlier_ * static_cast<std::int64_t>(sizeof(place)), sizeof(place));
    left_ = place - panel_.first_place - first_;
  }

  MatrixPanel panel_;
  PieceExpander expander_;
  const std::byte* piece_;
  Ahead ahead_;
  std::int64_t outlier_ = 0;
  std::int64_t first_ = 0;  ///< element of the panel at which the next piece begins
  std::int64_t left_ = kNone;
};

inline void expand_panel_of_matrix(const MatrixPanel& panel, const std::byte* next, std::byte* out) {
  PieceReader reader(panel, PiecesAhead(panel, next));
  for (std::int64_t i = 0; i < panel.num_pieces; ++i, out += kPiecePanelBytes) reader.expand(out);
}

/// Adds up the chains of each sum in the order of gemm_tile, and stores the sums. The last vector has
/// `last_lanes` lanes.
template <int kChains, int kRows, int kVectors>
void store_sums(const PanelGemm& gemm, const Simd::Vec (&sums)[kChains][kRows][kVectors],
                std::int64_t last_lanes) {
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = v == kVectors - 1 ? last_lanes : std::int64_t{Simd::kLanes};
      Simd::Vec sum = sums[0][r][v];
      if constexpr (kChains == 2) sum = Simd::add(sum, sums[1][r][v]);
      if constexpr (kChains == 4) {
        sum = Simd::add(Simd::add(sum, sums[1][r][v]), Simd::add(sums[2][r][v], sums[3][r][v]));
      }
      float* to = gemm.call.out + r * gemm.call.out_stride + v * Simd::kLanes;
      if (gemm.accumulate) sum = Simd::add(Simd::load(to, lanes), sum);
      Simd::store(to, sum, lanes);
    }
  }
}

/// gemm_tile for kRows rows and a panel of kVectors whole vectors, whose steps fill pieces evenly.
template <class Weights, int kRows, int kVectors>
void matrix_panel_tile(const PanelGemm& gemm, const MatrixPanel& panel) {
  using A = typename Weights::A;
  constexpr int kChains = chains_of(kVectors);
  constexpr int kPieceSteps = 4 / kVectors;
  static_assert(kPieceSteps == kChains && Weights::kInterleave == 2);
  const A* a = static_cast<const A*>(gemm.call.a);
  const std::int64_t a_stride = gemm.call.a_stride;
  Simd::Vec sums[kChains][kRows][kVectors];
  ADAPTRT_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[chain][r][v] = Simd::zero();
    }
  }
  PieceReader reader(panel, PiecesAhead(panel, gemm.call.next_panel));
  typename Weights::B words[4];
  const auto multiply = [&](int chain) __attribute__((always_inline)) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto value = Weights::broadcast(a + r * a_stride + 2 * chain);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[chain][r][v] = Weights::multiply_add(value, words[chain * kVectors + v], sums[chain][r][v]);
      }
    }
  };
  const std::int64_t steps = gemm.call.k / 2;
  for (std::int64_t i = 0; i < steps / kPieceSteps; ++i) {
    reader.expand(words);
    ADAPTRT_UNROLL
    for (int chain = 0; chain < kPieceSteps; ++chain) multiply(chain);
    a += 2 * kPieceSteps;
  }
  if constexpr (kPieceSteps > 1) {
    const std::int64_t left = steps % kPieceSteps;
    if (left > 0) reader.expand(words);
    ADAPTRT_UNROLL
    for (int chain = 0; chain < kPieceSteps - 1; ++chain) {
      if (chain < left) multiply(chain);
    }
  }
  store_sums(gemm, sums, Simd::kLanes);
}

/// Steps of k of a panel of some width that fill whole pieces, and a multiple of the chains of its sums.
struct PanelPart {
  static constexpr std::int64_t kPieces = 8;
  static constexpr std::int64_t kMostSteps = 64;

  explicit PanelPart(std::int64_t width) {
    const std::int64_t least =
        std::lcm(kPieceElements / 2 / std::gcd(width, kPieceElements / 2), std::int64_t{4});
    const std::int64_t pieces_of_least = least * width * 2 / kPieceElements;
    const std::int64_t times = std::max<std::int64_t>(1, kPieces / pieces_of_least);
    steps = least * times;
    pieces = pieces_of_least * times;
  }

  std::int64_t steps;
  std::int64_t pieces;
};

/// gemm_tile for kRows rows and a panel of kVectors vectors, the last of which may be partial. Parts of the
/// panel are expanded to the L1 cache.
template <class Weights, int kRows, int kVectors>
void matrix_panel_parts(const PanelGemm& gemm, const MatrixPanel& panel) {
  using A = typename Weights::A;
  constexpr int kChains = chains_of(kVectors);
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Weights::kColumnBytes;
  const PanelPart part(gemm.call.width);
  const std::int64_t row_bytes = gemm.call.width * Weights::kColumnBytes;
  const std::int64_t last_lanes = gemm.call.width - (kVectors - 1) * Simd::kLanes;
  const A* a = static_cast<const A*>(gemm.call.a);
  const std::int64_t a_stride = gemm.call.a_stride;
  Simd::Vec sums[kChains][kRows][kVectors];
  ADAPTRT_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[chain][r][v] = Simd::zero();
    }
  }
  alignas(kCacheLine) std::byte expanded[PanelPart::kMostSteps * kPairRowBytes + kVectorBytes];
  const std::byte* b = expanded;
  const auto step = [&](Simd::Vec(&sum)[kRows][kVectors], auto broadcast) __attribute__((always_inline)) {
    typename Weights::B columns[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      // Lanes after the panel's width are not stored.
      columns[v] = Weights::load(b + v * kVectorBytes);
    }
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto value = broadcast(a + r * a_stride);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Weights::multiply_add(value, columns[v], sum[r][v]);
    }
    a += Weights::kInterleave;
    b += row_bytes;
  };
  const auto whole = [](const A* from) __attribute__((always_inline)) { return Weights::broadcast(from); };
  const auto last = [](const A* from)
                        __attribute__((always_inline)) { return Weights::broadcast_last(from); };
  PieceReader reader(panel, PiecesAhead(panel, gemm.call.next_panel));
  std::int64_t steps = gemm.call.k / Weights::kInterleave;
  const bool odd = gemm.call.k % Weights::kInterleave != 0;
  for (std::int64_t piece = 0; piece < panel.num_pieces; piece += part.pieces) {
    const std::int64_t pieces = std::min(part.pieces, panel.num_pieces - piece);
    for (std::int64_t i = 0; i < pieces; ++i) reader.expand(expanded + i * kPiecePanelBytes);
    b = expanded;
    std::int64_t left = std::min(part.steps, steps);
    steps -= left;
    const bool is_last = piece + pieces == panel.num_pieces;
    for (; left >= kChains; left -= kChains) {
      ADAPTRT_UNROLL
      for (int chain = 0; chain < kChains; ++chain) step(sums[chain], whole);
    }
    ADAPTRT_UNROLL
    for (int chain = 0; chain < kChains; ++chain) {
      if (chain < left) step(sums[chain], whole);
      if (chain == left && odd && is_last) step(sums[chain], last);
    }
  }
  store_sums(gemm, sums, last_lanes);
}

using MatrixPanelTile = void (*)(const PanelGemm&, const MatrixPanel&);

/// The tile function for a number of rows, from 1 to kRows. kWhole: pieces are decoded in registers.
template <class Weights, int kVectors, bool kWhole, int kRows = kTileRows>
MatrixPanelTile matrix_panel_tile_of(std::int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return matrix_panel_tile_of<Weights, kVectors, kWhole, kRows - 1>(rows);
  }
  if constexpr (kWhole) return &matrix_panel_tile<Weights, kRows, kVectors>;
  return &matrix_panel_parts<Weights, kRows, kVectors>;
}

template <class Weights>
bool matrix_panel_gemm(const PanelGemm& gemm, const MatrixPanel& panel) {
  const std::int64_t rows = gemm.call.rows;
  if (rows > kTileRows) return false;
  const bool is_whole = gemm.call.width % Simd::kLanes == 0 && gemm.call.k % 2 == 0;
  const auto tile = [&]() -> MatrixPanelTile {
    switch ((gemm.call.width + Simd::kLanes - 1) / Simd::kLanes) {
      case 1:
        return is_whole ? matrix_panel_tile_of<Weights, 1, true>(rows)
                        : matrix_panel_tile_of<Weights, 1, false>(rows);
      case 2:
        return is_whole ? matrix_panel_tile_of<Weights, 2, true>(rows)
                        : matrix_panel_tile_of<Weights, 2, false>(rows);
      case 3:
        return matrix_panel_tile_of<Weights, 3, false>(rows);
      default:
        return is_whole ? matrix_panel_tile_of<Weights, 4, true>(rows)
                        : matrix_panel_tile_of<Weights, 4, false>(rows);
    }
  };
  tile()(gemm, panel);
  return true;
}

using MatrixPanelGemm = bool (*)(const PanelGemm& gemm, const MatrixPanel& panel);

/// nullptr if the vectors of a piece are not vectors of this instruction set.
template <class Weights>
constexpr MatrixPanelGemm matrix_panel_gemm_of() {
  if constexpr (kCanStream<Weights> && Simd::kLanes == kPieceOutputs) return &matrix_panel_gemm<Weights>;
  return nullptr;
}

}  // namespace
}  // namespace adaptrt
