#include "adaptrt/core/compressed_matrix.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "adaptrt/core/compressed_bound.h"
#include "adaptrt/core/panels.h"
#include "upper_bytes.h"

namespace adaptrt {
namespace {

constexpr std::size_t kMatrixHeaderBytes = 64;
constexpr std::size_t kMatrixOutlierBytes = sizeof(std::uint32_t) + sizeof(std::uint16_t);
constexpr std::int64_t kPieceHalfBytes = 64;
/// Places have 32 bits.
constexpr std::int64_t kPlacesLimit = std::int64_t{1} << 32;

std::int64_t count_pieces(std::int64_t width, std::int64_t k) {
  const std::int64_t elements = width * padded_k(DType::kBFloat16, k);
  return (elements + kPieceElements - 1) / kPieceElements;
}

std::int64_t num_pieces(std::int64_t n, std::int64_t k) {
  return n / kPanelColumns * count_pieces(kPanelColumns, k) + count_pieces(n % kPanelColumns, k);
}

std::size_t bytes_of_pieces(std::int64_t pieces, std::size_t outliers) {
  return kMatrixHeaderBytes + static_cast<std::size_t>(pieces * kCompressedPieceBytes) +
         outliers * kMatrixOutlierBytes;
}

std::uint32_t load_uint32(const std::byte* from) {
  std::uint32_t value = 0;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

/// Position of an element of a piece: byte `half` * kPieceHalfBytes + index, and that half of byte
/// 2 * kPieceHalfBytes + index.
struct PiecePlace {
  std::int64_t index;
  std::int64_t half;
};

constexpr PiecePlace find_in_piece(std::int64_t element) {
  constexpr std::int64_t kVectorElements = kPieceVectorBytes / 2;
  const std::int64_t vector = element / kVectorElements;
  const std::int64_t word = element % kVectorElements / 2;
  return {word / 4 * 16 + vector % 2 * 8 + word % 4 * 2 + element % 2, vector / 2};
}

/// Element of a piece by index and half.
constexpr auto element_table() {
  std::array<std::array<std::uint8_t, kPieceHalfBytes>, 2> elements{};
  for (std::int64_t element = 0; element < kPieceElements; ++element) {
    const PiecePlace place = find_in_piece(element);
    elements[static_cast<std::size_t>(place.half)][static_cast<std::size_t>(place.index)] =
        static_cast<std::uint8_t>(element);
  }
  return elements;
}

constexpr auto kElementAt = element_table();

/// Writes num_pieces * kPiecePanelBytes bytes.
void expand_panel(const MatrixPanel& panel, std::byte* out) {
  const std::byte* piece = panel.pieces;
  std::byte* to = out;
  for (std::int64_t i = 0; i < panel.num_pieces; ++i, piece += kCompressedPieceBytes) {
    for (std::int64_t element = 0; element < kPieceElements; ++element, to += 2) {
      const PiecePlace place = find_in_piece(element);
      const auto codes = static_cast<unsigned>(piece[2 * kPieceHalfBytes + place.index]);
      to[0] = piece[place.half * kPieceHalfBytes + place.index];
      to[1] = panel.table[codes >> static_cast<unsigned>(4 * place.half) & 0xfU];
    }
  }
  for (std::int64_t i = 0; i < panel.count; ++i) {
    const std::int64_t place = load_uint32(panel.places + i * 4) - panel.first_place;
    std::memcpy(out + place * 2, panel.bits + i * 2, sizeof(std::uint16_t));
  }
}

}  // namespace

std::size_t matrix_panel_offset(std::int64_t k, std::int64_t panel) {
  return bytes_of_pieces(panel * count_pieces(kPanelColumns, k), 0);
}

std::size_t matrix_panel_bytes(std::int64_t width, std::int64_t k) {
  return static_cast<std::size_t>(count_pieces(width, k) * kCompressedPieceBytes);
}

void CompressedBound::add(const std::byte* elements, std::int64_t count) {
  UpperBytes::count(elements, count, &counts_);
}

std::size_t CompressedBound::bytes(std::int64_t n, std::int64_t k) const {
  const std::size_t plain = panel_bytes(DType::kBFloat16, n, k);
  const std::int64_t pieces = num_pieces(n, k);
  if (pieces * kPieceElements >= kPlacesLimit) return plain;
  const auto outliers = static_cast<std::size_t>(UpperBytes(counts_).num_outliers());
  return std::min(plain, bytes_of_pieces(pieces, outliers));
}

std::size_t compress_matrix(const std::byte* panels, std::int64_t n, std::int64_t k, std::byte* out) {
  const std::int64_t pieces = num_pieces(n, k);
  const std::size_t plain = panel_bytes(DType::kBFloat16, n, k);
  if (bytes_of_pieces(pieces, 0) >= plain || pieces * kPieceElements >= kPlacesLimit) return 0;
  const std::size_t most_outliers = (plain - 1 - bytes_of_pieces(pieces, 0)) / kMatrixOutlierBytes;
  const UpperBytes upper(panels, static_cast<std::int64_t>(plain / sizeof(std::uint16_t)));
  if (static_cast<std::size_t>(upper.num_outliers()) > most_outliers) return 0;
  std::memset(out, 0, kMatrixHeaderBytes);
  std::memcpy(out, upper.table().data(), kTableBytes);
  std::vector<std::uint32_t> places;
  std::vector<std::uint16_t> bits;
  std::array<std::uint16_t, kPieceElements> elements;
  std::byte* piece = out + kMatrixHeaderBytes;
  std::int64_t place = 0;
  for (std::int64_t panel = 0; panel < panel_count(n); ++panel) {
    const std::int64_t width = panel_width(n, panel);
    const std::byte* from = panels + panel_offset(DType::kBFloat16, k, panel);
    std::int64_t left = width * padded_k(DType::kBFloat16, k);
    for (; left > 0; left -= kPieceElements, place += kPieceElements, piece += kCompressedPieceBytes) {
      const auto count = static_cast<std::size_t>(std::min(left, kPieceElements));
      std::memcpy(elements.data(), from, count * sizeof(std::uint16_t));
      std::fill(elements.begin() + static_cast<std::ptrdiff_t>(count), elements.end(), std::uint16_t{0});
      from += kPiecePanelBytes;
      std::array<std::uint8_t, kPieceElements> codes;
      std::uint8_t all = 0;
      for (std::size_t i = 0; i < elements.size(); ++i) all |= codes[i] = upper.code(elements[i]);
      if (all >= kTableBytes) {
        for (std::size_t i = 0; i < elements.size(); ++i) {
          if (codes[i] < kTableBytes) continue;
          codes[i] = 0;
          if (i >= count) continue;
          places.push_back(static_cast<std::uint32_t>(place + static_cast<std::int64_t>(i)));
          bits.push_back(elements[i]);
        }
      }
      for (std::size_t i = 0; i < kPieceHalfBytes; ++i) {
        const std::size_t low = kElementAt[0][i];
        const std::size_t high = kElementAt[1][i];
        piece[i] = static_cast<std::byte>(elements[low]);
        piece[kPieceHalfBytes + i] = static_cast<std::byte>(elements[high]);
        piece[2 * kPieceHalfBytes + i] = static_cast<std::byte>(codes[low] | codes[high] << 4U);
      }
    }
  }
  const auto count = static_cast<std::uint32_t>(places.size());
  std::memcpy(out + kTableBytes, &count, sizeof(count));
  if (count > 0) {
    std::memcpy(piece, places.data(), count * sizeof(std::uint32_t));
    std::memcpy(piece + count * sizeof(std::uint32_t), bits.data(), count * sizeof(std::uint16_t));
  }
  return bytes_of_pieces(pieces, count);
}

std::size_t compressed_matrix_bytes(const std::byte* matrix, std::int64_t n, std::int64_t k) {
  return bytes_of_pieces(num_pieces(n, k), load_uint32(matrix + kTableBytes));
}

MatrixPanel find_matrix_panel(const std::byte* matrix, std::int64_t n, std::int64_t k, std::int64_t panel) {
  constexpr auto kPlaceBytes = static_cast<std::int64_t>(sizeof(std::uint32_t));
  const std::int64_t before = panel * count_pieces(kPanelColumns, k);
  MatrixPanel found{.table = matrix,
                    .pieces = matrix + matrix_panel_offset(k, panel),
                    .num_pieces = count_pieces(panel_width(n, panel), k),
                    .first_place = before * kPieceElements};
  const std::int64_t outliers = load_uint32(matrix + kTableBytes);
  if (outliers == 0) return found;
  const std::byte* places = matrix + bytes_of_pieces(num_pieces(n, k), 0);
  // Without branches, which would be mispredicted: kernels search for each of many small panels.
  std::int64_t first = 0;
  for (std::int64_t left = outliers; left > 0;) {
    const std::int64_t half = (left + 1) / 2;
    first += load_uint32(places + (first + half - 1) * kPlaceBytes) < found.first_place ? half : 0;
    left -= half;
  }
  found.places = places + first * kPlaceBytes;
  found.bits = places + outliers * kPlaceBytes + first * static_cast<std::int64_t>(sizeof(std::uint16_t));
  const std::int64_t end = found.first_place + found.num_pieces * kPieceElements;
  while (first + found.count < outliers && load_uint32(found.places + found.count * kPlaceBytes) < end) {
    ++found.count;
  }
  return found;
}

std::vector<std::byte> expand_matrix(const std::byte* matrix, std::int64_t n, std::int64_t k) {
  std::vector<std::byte> panels(panel_bytes(DType::kBFloat16, n, k));
  std::vector<std::byte> expanded;
  for (std::int64_t i = 0; i < panel_count(n); ++i) {
    const MatrixPanel panel = find_matrix_panel(matrix, n, k, i);
    expanded.resize(static_cast<std::size_t>(panel.num_pieces * kPiecePanelBytes));
    expand_panel(panel, expanded.data());
    std::memcpy(panels.data() + panel_offset(DType::kBFloat16, k, i), expanded.data(),
                panel_bytes(DType::kBFloat16, panel_width(n, i), k));
  }
  return panels;
}

}  // namespace adaptrt
