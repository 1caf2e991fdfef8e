#include "compress_image.h"

#include <algorithm>
#include <cstring>

#include "image_sizes.h"

namespace adaptrt {

DeviceSite ImageCompressor::compress(const LoraLayout& layout, const LoraSite& site,
                                     const DeviceSite& image) {
  DeviceSite result = image;
  if (!site.is_of_layer() && !site.is_lm_head()) return result;
  result.a_storage = compress(layout, a_of(layout, site, image));
  for (std::size_t i = 0; i < site.parts.size(); ++i) {
    DevicePart& part = result.parts[i];
    if (part.rank > 0) part.b_storage = compress(layout, b_of(layout, site, i, part));
  }
  return result;
}

LoraStorage ImageCompressor::compress(const LoraLayout& layout, const StoredMatrix& matrix) {
  compressed_.resize(std::max(compressed_.size(), matrix_bytes(layout, matrix)));
  const std::size_t bytes = compress_matrix(matrix.data, matrix.n, matrix.k, compressed_.data());
  if (bytes == 0) return LoraStorage::kExact;
  // The image belongs to the caller, but DeviceSite has the addresses that kernels read.
  std::memcpy(const_cast<std::byte*>(matrix.data), compressed_.data(), bytes);
  return LoraStorage::kCompressed;
}

}  // namespace adaptrt
