#include "device_weights.h"

#include <algorithm>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "kernel_configs.h"

namespace adaptrt {
namespace {

std::span<const std::byte> bytes_of(const PanelMatrix& matrix) {
  return {matrix.data, matrix.bytes()};
}

std::span<const std::byte> bytes_of(const VectorView& vector) {
  return std::as_bytes(std::span(vector.data, static_cast<std::size_t>(vector.size)));
}

/// Bytes of the parts of a quantised matrix, which follow one another.
struct QuantizedBytes {
  std::span<const std::byte> weights;
  std::span<const std::byte> scales;
  std::span<const std::byte> zeros;  ///< empty without zero points
};

QuantizedBytes quantized_bytes(const PanelMatrix& matrix) {
  const QuantizedPanel parts = parts_of_panel(matrix.quantization, matrix.data, matrix.k, matrix.n);
  const std::byte* end = matrix.data + matrix.bytes();
  const std::byte* scales_end = parts.extra == nullptr ? end : parts.extra;
  return {.weights = {parts.weights, parts.scales},
          .scales = {parts.scales, scales_end},
          .zeros = {scales_end, end}};
}

/// Size of the rows of zeros behind `rows` rows that are as wide as those of `matrix`.
std::size_t bytes_of_padding(std::int64_t rows, const PanelMatrix& matrix) {
  return static_cast<std::size_t>((padded_rows(rows) - rows) * matrix.k) * size_of(matrix.dtype);
}

}  // namespace

ResidentWeights::ResidentWeights(Device& device, Stream& stream, std::size_t staging_bytes)
    : device_(device), stream_(stream), copies_(device, stream, staging_bytes) {}

const void* DeviceWeights::matrices(std::span<const LinearPart> parts) {
  std::vector<Piece> pieces;
  std::int64_t rows = 0;
  for (const LinearPart& part : parts) {
    pieces.push_back(bytes_of(part.weight));
    rows += part.weight.n;
  }
  return copy(pieces, bytes_of_padding(rows, parts.front().weight));
}

QuantizedMatrices DeviceWeights::quantized_matrices(std::span<const LinearPart> parts) {
  std::int64_t rows = 0;
  for (const LinearPart& part : parts) rows += part.weight.n;
  // Copies one kind of bytes of all parts, and the same of the rows of zeros.
  const auto copy_all = [&](std::span<const std::byte> QuantizedBytes::* kind) -> const std::byte* {
    std::vector<Piece> pieces;
    for (const LinearPart& part : parts) pieces.push_back(quantized_bytes(part.weight).*kind);
    const std::size_t row_bytes = pieces.front().size() / static_cast<std::size_t>(parts.front().weight.n);
    if (row_bytes == 0) return nullptr;
    return copy(pieces, static_cast<std::size_t>(padded_rows(rows) - rows) * row_bytes);
  };
  return {.weights = copy_all(&QuantizedBytes::weights),
          .scales = reinterpret_cast<const float*>(copy_all(&QuantizedBytes::scales)),
          .zeros = reinterpret_cast<const std::uint8_t*>(copy_all(&QuantizedBytes::zeros))};
}

const void* DeviceWeights::matrix(const PanelMatrix& matrix) {
  const Piece piece = bytes_of(matrix);
  return copy({&piece, 1}, bytes_of_padding(matrix.n, matrix));
}

const float* DeviceWeights::vector(const VectorView& vector) {
  if (vector.size == 0) return nullptr;
  const Piece piece = bytes_of(vector);
  return reinterpret_cast<const float*>(copy({&piece, 1}, 0));
}

const float* DeviceWeights::biases(std::span<const LinearPart> parts) {
  if (std::ranges::all_of(parts, [](const LinearPart& part) { return part.bias.size == 0; })) return nullptr;
  std::int64_t widest = 0;
  for (const LinearPart& part : parts) widest = std::max(widest, part.weight.n);
  const std::vector<float> zeros(static_cast<std::size_t>(widest));
  std::vector<Piece> pieces;
  for (const LinearPart& part : parts) {
    pieces.push_back(part.bias.size > 0
                         ? bytes_of(part.bias)
                         : std::as_bytes(std::span(zeros).first(static_cast<std::size_t>(part.weight.n))));
  }
  return reinterpret_cast<const float*>(copy(pieces, 0));
}

const std::byte* ResidentWeights::copy(std::span<const Piece> pieces, std::size_t padding) {
  std::vector<std::pair<const std::byte*, std::size_t>> key;
  std::size_t bytes = 0;
  for (const Piece& piece : pieces) {
    key.emplace_back(piece.data(), piece.size());
    bytes += piece.size();
  }
  const auto [found, is_new] = addresses_.try_emplace(std::move(key), nullptr);
  if (is_new) {
    memory_.push_back(device_.allocate(bytes + padding));
    std::byte* next = memory_.back().data();
    found->second = next;
    for (const Piece& piece : pieces) {
      copies_.copy(next, piece);
      next += piece.size();
    }
    if (padding > 0) stream_.fill_zero(next, padding);
  }
  return found->second;
}

}  // namespace adaptrt
