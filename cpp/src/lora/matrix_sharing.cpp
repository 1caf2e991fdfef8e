#include "matrix_sharing.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "image_sizes.h"

namespace adaptrt {

std::vector<std::span<const std::byte>> pieces_of(const LoraLayout& layout, const LoraSite& site,
                                                  const DeviceSite& image) {
  std::vector<std::span<const std::byte>> pieces;
  pieces.emplace_back(image.a, matrix_bytes(layout, a_of(layout, site, image)));
  if (image.rank_scales != nullptr) {
    pieces.emplace_back(reinterpret_cast<const std::byte*>(image.rank_scales),
                        vector_bytes(image.total_rank));
  }
  for (std::size_t i = 0; i < site.parts.size(); ++i) {
    const DevicePart& part = image.parts[i];
    if (part.rank == 0) continue;
    const std::int64_t out_size = site.parts[i].out_size;
    pieces.emplace_back(part.b, matrix_bytes(layout, b_of(layout, site, i, part)));
    for (const float* vector : {part.magnitude, part.shift}) {
      if (vector != nullptr) {
        pieces.emplace_back(reinterpret_cast<const std::byte*>(vector), vector_bytes(out_size));
      }
    }
  }
  return pieces;
}

DeviceSite MatrixSharing::keep(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image) {
  std::vector<std::span<const std::byte>> pieces = pieces_of(layout, site, image);
  std::ranges::sort(pieces, {}, [](std::span<const std::byte> piece) { return piece.data(); });
  std::vector<std::pair<const std::byte*, const std::byte*>> places;  // in the image, and kept
  for (const std::span<const std::byte> piece : pieces) {
    std::byte* const place = memory_->array.data() + used_bytes_;
    // Matrices that were not kept leave gaps, so places are never after the image's.
    if (place != piece.data()) std::memmove(place, piece.data(), piece.size());
    places.emplace_back(piece.data(), place);
    const std::size_t bytes = aligned_bytes(piece.size());
    if (piece.size() < kMinSharedBytes) {
      own_bytes_ += bytes;
      used_bytes_ += bytes;
      continue;
    }
    std::shared_ptr<SharedMatrix> matrix = known_.find_or_add(memory_, {place, piece.size()});
    places.back().second = matrix->bytes().data();
    if (places.back().second == place) used_bytes_ += bytes;
    if (have_.insert(matrix.get()).second) matrices_.push_back(std::move(matrix));
  }
  const auto kept = [&](const std::byte* address) {
    return std::ranges::find(places, address, &decltype(places)::value_type::first)->second;
  };
  return with_addresses(image, kept);
}

}  // namespace adaptrt
