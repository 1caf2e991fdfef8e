#pragma once

#include <cstddef>
#include <vector>

#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/stored_matrix.h"

namespace adaptrt {

/// Compresses the matrices of images in place.
class ImageCompressor {
 public:
  /// Compresses A and B of a linear layer's image if their values fit; other sites and their vectors stay as
  /// they are. Returns the image with the storage of its matrices, at the same addresses.
  [[nodiscard]] DeviceSite compress(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image);

 private:
  [[nodiscard]] LoraStorage compress(const LoraLayout& layout, const StoredMatrix& matrix);

  std::vector<std::byte> compressed_;
};

}  // namespace adaptrt
