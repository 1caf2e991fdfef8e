#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <unordered_set>
#include <vector>

#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/shared_matrices.h"

namespace adaptrt {

/// Returns the matrices and vectors of a site's image, in an order that does not depend on their addresses.
[[nodiscard]] std::vector<std::span<const std::byte>> pieces_of(const LoraLayout& layout,
                                                                const LoraSite& site,
                                                                const DeviceSite& image);

/// Returns an image whose matrices and vectors are at moved(address).
template <class Moved>
[[nodiscard]] DeviceSite with_addresses(DeviceSite image, const Moved& moved) {
  const auto move_vector = [&](const float** vector) {
    if (*vector != nullptr) {
      *vector = reinterpret_cast<const float*>(moved(reinterpret_cast<const std::byte*>(*vector)));
    }
  };
  image.a = moved(image.a);
  move_vector(&image.rank_scales);
  for (DevicePart& part : image.parts) {
    if (part.rank == 0) continue;
    part.b = moved(part.b);
    move_vector(&part.magnitude);
    move_vector(&part.shift);
  }
  return image;
}

/// Keeps images after each other in the memory of one adapter, without the matrices that SharedMatrices has.
class MatrixSharing {
 public:
  MatrixSharing(SharedMatrices& known, std::shared_ptr<PackedMemory> memory)
      : known_(known), memory_(std::move(memory)) {}

  /// Address for the next image.
  [[nodiscard]] const std::byte* next() const { return memory_->array.data() + used_bytes_; }
  /// Keeps what is new in the image at next(). Returns the image with the addresses of its parts.
  [[nodiscard]] DeviceSite keep(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image);

  /// Different matrices of the images.
  [[nodiscard]] std::vector<std::shared_ptr<SharedMatrix>> take_matrices() { return std::move(matrices_); }
  /// Bytes of the images that are in none of the matrices.
  [[nodiscard]] std::size_t own_bytes() const { return own_bytes_; }
  /// Bytes of the memory that are in use.
  [[nodiscard]] std::size_t used_bytes() const { return used_bytes_; }

 private:
  SharedMatrices& known_;
  std::shared_ptr<PackedMemory> memory_;
  std::size_t used_bytes_ = 0;
  std::size_t own_bytes_ = 0;
  std::vector<std::shared_ptr<SharedMatrix>> matrices_;
  std::unordered_set<const SharedMatrix*> have_;
};

}  // namespace adaptrt
