#pragma once

#include <cstddef>
#include <cstdint>

namespace adaptrt {

// Compressed panels: the elements of a bfloat16 panel of core/panels.h in twelve bits each, exactly.
//
// The lower byte of a weight looks random, but its upper byte, the sign and seven bits of the exponent, takes
// few values. A compressed panel stores the upper byte as four bits: an index into the panel's own sixteen
// most frequent upper bytes: as a rule both signs of sixteen exponents. Elements with another upper byte are
// outliers, which are stored separately. A last panel with fewer than
// kPanelColumns outputs is not compressed: it keeps the layout of core/panels.h. For a panel of kPanelColumns
// outputs and E places for outliers:
//
//   uint8 [16]             the table of upper bytes
//   uint32                 number of outliers, at most E
//   uint32 [E]             from byte 64 on: their places in the panel of core/panels.h, ascending
//   uint16 [E]             their bits
//   uint8 [k / 8][4][192]  from the next multiple of 64 on: pieces of eight inputs of sixteen outputs
//
// Input 2 u + e of a piece's eight and output c of its sixteen have index i = c / 4 * 16 + u % 2 * 8 + c % 4
// * 2 + e: byte u / 2 * 64 + i is the lower byte, half u / 2 (0: the lower) of byte 128 + i the index of the
// upper one. Interleaving sixteen lower bytes with their upper ones makes the bfloat16 of two pairs of
// inputs, in the order in which they are multiplied.

/// PanelMatrix::outliers of a matrix that is not compressed.
inline constexpr std::int64_t kNotCompressed = -1;
/// Inputs and outputs of a piece, and its bytes.
inline constexpr std::int64_t kPieceInputs = 8;
inline constexpr std::int64_t kPieceOutputs = 16;
inline constexpr std::int64_t kCompressedPieceBytes = 192;
/// Upper bytes of a panel's table.
inline constexpr std::int64_t kTableBytes = 16;

/// True if a bfloat16 W[n, k] can be compressed: k must be a multiple of kPieceInputs.
[[nodiscard]] bool can_be_compressed(std::int64_t n, std::int64_t k);

/// Bytes of a compressed W[n, k] with places for `outliers` in each panel that is compressed.
[[nodiscard]] std::size_t compressed_bytes(std::int64_t n, std::int64_t k, std::int64_t outliers);

/// Bytes of a compressed panel of k inputs with places for `outliers`: a multiple of 64.
[[nodiscard]] std::size_t compressed_panel_bytes(std::int64_t k, std::int64_t outliers);

/// Byte offset in a panel of the weights of input `input`, which is a multiple of kPieceInputs.
[[nodiscard]] std::size_t compressed_input_offset(std::int64_t input, std::int64_t outliers);

/// Number of outliers of a bfloat16 panel of kPanelColumns outputs.
[[nodiscard]] std::int64_t count_outliers(const std::byte* panel, std::int64_t k);

/// Writes all compressed_panel_bytes(k, outliers) bytes of `out`; `outliers` is at least
/// count_outliers(panel, k).
void compress_panel(const std::byte* panel, std::int64_t k, std::int64_t outliers, std::byte* out);

/// Addresses of the parts of a compressed panel.
struct CompressedPanel {
  const std::byte* table = nullptr;   ///< [kTableBytes]
  const std::byte* places = nullptr;  ///< uint32 [count]
  const std::byte* bits = nullptr;    ///< uint16 [count]
  std::int64_t count = 0;             ///< number of outliers; at most the number of places
  const std::byte* pieces = nullptr;
};

[[nodiscard]] CompressedPanel parts_of_compressed(const std::byte* panel, std::int64_t outliers);

}  // namespace adaptrt
