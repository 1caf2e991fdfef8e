#include "adaptrt/core/compressed_panels.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "adaptrt/core/panels.h"
#include "unpack_compressed.h"
#include "upper_bytes.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kAlignment = 64;
constexpr std::int64_t kHeaderBytes = 64;
constexpr std::int64_t kCountOffset = kTableBytes;
constexpr std::int64_t kOutlierBytes = sizeof(std::uint32_t) + sizeof(std::uint16_t);
constexpr std::int64_t kPiecesAcross = kPanelColumns / kPieceOutputs;
constexpr std::int64_t kHalfBytes = 64;

std::int64_t pieces_offset(std::int64_t outliers) {
  const std::int64_t end = kHeaderBytes + outliers * kOutlierBytes;
  return (end + kAlignment - 1) / kAlignment * kAlignment;
}

std::uint16_t element_at(const std::byte* panel, std::int64_t place) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, panel + place * static_cast<std::int64_t>(sizeof(bits)), sizeof(bits));
  return bits;
}

/// Location of an element in a panel's pieces: byte `piece` + half * 64 + index, and that half of byte
/// `piece` + 128 + index.
struct ElementPlace {
  std::int64_t piece;
  std::int64_t index;
  std::int64_t half;
};

ElementPlace find_element(std::int64_t column, std::int64_t input) {
  const std::int64_t pair = input % kPieceInputs / 2;
  const std::int64_t output = column % kPieceOutputs;
  const std::int64_t piece = input / kPieceInputs * kPiecesAcross + column / kPieceOutputs;
  return {piece * kCompressedPieceBytes, output / 4 * 16 + pair % 2 * 8 + output % 4 * 2 + input % 2,
          pair / 2};
}

/// Column and input of an element of a bfloat16 panel.
struct Element {
  std::int64_t column;
  std::int64_t input;
};

Element element_of(std::int64_t place) {
  constexpr std::int64_t kPair = k_interleave(DType::kBFloat16);
  return {place / kPair % kPanelColumns, place / kPair / kPanelColumns * kPair + place % kPair};
}

}  // namespace

bool can_be_compressed(std::int64_t n, std::int64_t k) {
  // Outlier positions have 32 bits.
  constexpr std::int64_t kInputsLimit = (std::int64_t{1} << 32) / kPanelColumns;
  return n > 0 && k > 0 && k < kInputsLimit && k % kPieceInputs == 0;
}

std::size_t compressed_bytes(std::int64_t n, std::int64_t k, std::int64_t outliers) {
  return static_cast<std::size_t>(n / kPanelColumns) * compressed_panel_bytes(k, outliers) +
         panel_bytes(DType::kBFloat16, n % kPanelColumns, k);
}

std::size_t compressed_panel_bytes(std::int64_t k, std::int64_t outliers) {
  return compressed_input_offset(k, outliers);
}

std::size_t compressed_input_offset(std::int64_t input, std::int64_t outliers) {
  return static_cast<std::size_t>(pieces_offset(outliers) +
                                  input / kPieceInputs * kPiecesAcross * kCompressedPieceBytes);
}

std::int64_t count_outliers(const std::byte* panel, std::int64_t k) {
  return UpperBytes(panel, k * kPanelColumns).num_outliers();
}

void compress_panel(const std::byte* panel, std::int64_t k, std::int64_t outliers, std::byte* out) {
  std::memset(out, 0, compressed_panel_bytes(k, outliers));
  const UpperBytes upper(panel, k * kPanelColumns);
  std::memcpy(out, upper.table().data(), kTableBytes);
  std::byte* const places = out + kHeaderBytes;
  std::byte* const others = places + outliers * static_cast<std::int64_t>(sizeof(std::uint32_t));
  std::byte* const pieces = out + pieces_offset(outliers);
  std::uint32_t count = 0;
  for (std::int64_t i = 0; i < k * kPanelColumns; ++i) {
    const std::uint16_t bits = element_at(panel, i);
    const std::uint8_t code = upper.code(bits);
    if (code == UpperBytes::kNoCode) {
      assert(count < outliers);
      const auto place = static_cast<std::uint32_t>(i);
      std::memcpy(places + count * sizeof(place), &place, sizeof(place));
      std::memcpy(others + count * sizeof(bits), &bits, sizeof(bits));
      ++count;
      continue;
    }
    const Element element = element_of(i);
    const ElementPlace at = find_element(element.column, element.input);
    pieces[at.piece + at.half * kHalfBytes + at.index] = static_cast<std::byte>(bits);
    pieces[at.piece + 2 * kHalfBytes + at.index] |= static_cast<std::byte>(code << (4 * at.half));
  }
  std::memcpy(out + kCountOffset, &count, sizeof(count));
}

CompressedPanel parts_of_compressed(const std::byte* panel, std::int64_t outliers) {
  std::uint32_t count = 0;
  std::memcpy(&count, panel + kCountOffset, sizeof(count));
  const std::byte* places = panel + kHeaderBytes;
  return {.table = panel,
          .places = places,
          .bits = places + outliers * static_cast<std::int64_t>(sizeof(std::uint32_t)),
          .count = std::min<std::int64_t>(count, outliers),
          .pieces = panel + pieces_offset(outliers)};
}

void unpack_compressed_row(const PanelMatrix& matrix, std::int64_t row, float* out) {
  const CompressedPanel panel =
      parts_of_compressed(matrix.data + matrix.offset(row / kPanelColumns), matrix.outliers);
  const std::int64_t column = row % kPanelColumns;
  for (std::int64_t input = 0; input < matrix.k; ++input) {
    const ElementPlace at = find_element(column, input);
    const auto codes = static_cast<unsigned>(panel.pieces[at.piece + 2 * kHalfBytes + at.index]);
    const auto code = (codes >> static_cast<unsigned>(4 * at.half)) & 0xfU;
    const auto lower = static_cast<unsigned>(panel.pieces[at.piece + at.half * kHalfBytes + at.index]);
    const unsigned bits = static_cast<unsigned>(panel.table[code]) << 8U | lower;
    out[input] = bfloat16_to_float(static_cast<std::uint16_t>(bits));
  }
  for (std::int64_t i = 0; i < panel.count; ++i) {
    std::uint32_t place = 0;
    std::memcpy(&place, panel.places + i * static_cast<std::int64_t>(sizeof(place)), sizeof(place));
    const Element element = element_of(place);
    if (element.column == column && element.input < matrix.k) {
      out[element.input] = bfloat16_to_float(element_at(panel.bits, i));
    }
  }
}

}  // namespace adaptrt
