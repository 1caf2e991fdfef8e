#include "compress_image.h"

#include <algorithm>
#include <cstring>

#include "image_sizes.h"

namespace adaptrt {

DeviceSite ImageCompressor::compress(const LoraLayout& layout, const LoraSite& site,
                                     const DeviceSite& image) {
  DeviceSite result = image;
  if (!site.is_of_layer() && !site.is_lm_head()) return result;
  result.a_storage = compress(layout, image.a, image.total_rank, site.in_size);
  for (std::size_t i = 0; i < site.parts.size(); ++i) {
    DevicePart& part = result.parts[i];
    if (part.rank > 0) part.b_storage = compress(layout, part.b, site.parts[i].out_size, part.rank);
  }
  return result;
}

LoraStorage ImageCompressor::compress(const LoraLayout& layout, const std::byte* matrix, std::int64_t n,
                                      std::int64_t k) {
  compressed_.resize(std::max(compressed_.size(), matrix_bytes(layout, n, k)));
  const std::size_t bytes = compress_matrix(matrix, n, k, compressed_.data());
  if (bytes == 0) return LoraStorage::kExact;
  // The image belongs to the caller, but DeviceSite has the addresses that kernels read.
  std::memcpy(const_cast<std::byte*>(matrix), compressed_.data(), bytes);
  return LoraStorage::kCompressed;
}

}  // namespace adaptrt
