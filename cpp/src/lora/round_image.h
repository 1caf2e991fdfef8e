#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/core/int8_matrix.h"
#include "adaptrt/lora/device_plan.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/stored_matrix.h"

namespace adaptrt {

/// Scales of the rows of A[total_rank, in] and of the columns of B that belong to them.
struct ImageScales {
  std::vector<float> a;
  std::vector<float> b;

  /// DeviceSite::rank_scales.
  [[nodiscard]] std::vector<float> products() const;
};

/// Bytes of the image of these modules at a site in int8; nullopt if the site stays exact, because it is no
/// linear layer, or because its matrices would not all become smaller. The same for each rank.
[[nodiscard]] std::optional<std::size_t> int8_image_bytes(const LoraLayout& layout, const LoraSite& site,
                                                          std::span<const ModuleRank> modules);

/// True if the products of the scales are finite. Only values that leave the range of float32 in exact
/// products as well have other scales; their sites stay exact.
[[nodiscard]] bool are_finite(std::span<const float> products);

/// Rounds the matrices of images to int8 in place.
class ImageRounder {
 public:
  /// Rounds A and B of a linear layer's image, with one scale for each rank of each, and writes
  /// DeviceSite::rank_scales after A. Modules that share A have the same scales for B. Other sites, vectors,
  /// and sites whose matrices would not all become smaller stay as they are. Returns the image with the
  /// storage of its matrices, at the same addresses.
  [[nodiscard]] DeviceSite round(const LoraLayout& layout, const LoraSite& site,
                                 std::span<const ModuleRank> modules, const DeviceSite& image);
  /// The same for a rank's part of the matrices, with the scales of the whole ones.
  [[nodiscard]] DeviceSite round(const LoraLayout& layout, const LoraSite& site,
                                 std::span<const ModuleRank> modules, const ImageScales& scales,
                                 const DeviceSite& image);

 private:
  void round(const StoredMatrix& matrix, ScaleAxis axis, std::span<const float> scales);

  std::vector<std::byte> rounded_;
};

}  // namespace adaptrt
