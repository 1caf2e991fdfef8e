#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/compressed_panels.h"

namespace adaptrt {

// Compressed matrices: the elements of all bfloat16 panels of a matrix (core/panels.h) in twelve bits each,
// exactly, with one table of upper bytes. Adapters use them, because their matrices are small and their
// panels may have any width. core/compressed_panels.h explains the encoding.
//
//   uint8 [16]            the table of upper bytes
//   uint32                number of outliers
//   uint8 [pieces][192]   from byte 64 on: the panels one after another, each in whole pieces
//   uint32 [outliers]     their places, ascending: piece * kPieceElements + element
//   uint16 [outliers]     their bits
//
// A piece holds kPieceElements consecutive elements of a panel. PieceExpander::expand writes them in order,
// if its rows are kPieceVectorBytes apart. The last piece of a panel is padded with zeros.

/// Elements of a piece, its bytes as bfloat16, and the bytes of one of its four vectors.
inline constexpr std::int64_t kPieceElements = kPieceInputs * kPieceOutputs;
inline constexpr std::int64_t kPiecePanelBytes = kPieceElements * 2;
inline constexpr std::int64_t kPieceVectorBytes = 64;

/// One panel of a compressed matrix.
struct MatrixPanel {
  const std::byte* table = nullptr;   ///< [kTableBytes]
  const std::byte* pieces = nullptr;  ///< uint8 [num_pieces][kCompressedPieceBytes]
  std::int64_t num_pieces = 0;
  /// Place of the panel's first element.
  std::int64_t first_place = 0;
  const std::byte* places = nullptr;  ///< uint32 [count]: places of the panel's outliers, ascending
  const std::byte* bits = nullptr;    ///< uint16 [count]
  std::int64_t count = 0;
};

/// Writes the compressed form of the panels of a bfloat16 W[n, k] to `out`, which has room for panel_bytes()
/// bytes and does not overlap `panels`. Returns its number of bytes, or 0 if it would not be smaller than the
/// panels; `out` is then unspecified.
[[nodiscard]] std::size_t compress_matrix(const std::byte* panels, std::int64_t n, std::int64_t k,
                                          std::byte* out);

/// Bytes of a compressed W[n, k].
[[nodiscard]] std::size_t compressed_matrix_bytes(const std::byte* matrix, std::int64_t n, std::int64_t k);

/// Byte offset in a compressed matrix of the pieces of panel `panel`, and bytes of the pieces of a panel of
/// `width` outputs.
[[nodiscard]] std::size_t matrix_panel_offset(std::int64_t k, std::int64_t panel);
[[nodiscard]] std::size_t matrix_panel_bytes(std::int64_t width, std::int64_t k);

/// Panel `panel` of a compressed W[n, k].
[[nodiscard]] MatrixPanel find_matrix_panel(const std::byte* matrix, std::int64_t n, std::int64_t k,
                                            std::int64_t panel);

/// Returns the panels of a compressed bfloat16 W[n, k]. Kernels have faster versions.
[[nodiscard]] std::vector<std::byte> expand_matrix(const std::byte* matrix, std::int64_t n, std::int64_t k);

}  // namespace adaptrt
