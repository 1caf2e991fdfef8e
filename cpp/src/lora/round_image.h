#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Rounds the matrices of images to int8 in place.
class ImageRounder {
 public:
  /// Rounds A and B of a linear layer's image, with one scale for each rank of each, and writes
  /// DeviceSite::rank_scales after A. Modules that share A have the same scales for B. Other sites, vectors,
  /// and sites whose matrices would not all become smaller stay as they are. Returns the image with the
  /// storage of its matrices, at the same addresses.
  [[nodiscard]] DeviceSite round(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image);

 private:
  /// Calls visit(index of the part, its outputs) for the parts that the adapter changes.
  template <class Visit>
  static void for_each_part(const LoraSite& site, const DeviceSite& image, const Visit& visit);
  [[nodiscard]] static bool becomes_smaller(const LoraLayout& layout, const LoraSite& site,
                                            const DeviceSite& image);
  void find_scales(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image);
  [[nodiscard]] std::span<const float> b_scales_of(const DevicePart& part) const;

  std::vector<float> a_scales_;
  std::vector<float> b_scales_;
  std::vector<float> products_;
  std::vector<std::byte> rounded_;
};

}  // namespace adaptrt
