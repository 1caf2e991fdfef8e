#include "round_image.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "image_sizes.h"

namespace adaptrt {
namespace {

/// The image belongs to the caller, but DeviceSite has the addresses that kernels read.
std::byte* writable(const std::byte* address) {
  return const_cast<std::byte*>(address);
}

/// A part's columns of B among those of the site.
template <class Scales>
auto of_part(Scales& scales, const DevicePart& part) {
  return std::span(scales).subspan(static_cast<std::size_t>(part.rank_offset),
                                   static_cast<std::size_t>(part.rank));
}

/// Calls visit(index of the part) for the parts that the adapter changes.
template <class Visit>
void for_each_part(const LoraSite& site, const DeviceSite& image, const Visit& visit) {
  for (std::size_t i = 0; i < site.parts.size(); ++i) {
    if (image.parts[i].rank > 0) visit(i);
  }
}

/// The scales of an image with whole matrices.
ImageScales find_scales(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image) {
  const auto rank = static_cast<std::size_t>(image.total_rank);
  ImageScales scales{std::vector<float>(rank), std::vector<float>(rank)};
  const StoredMatrix a = a_of(layout, site, image);
  raise_maxima(a.data, a.dtype, a.n, a.k, ScaleAxis::kOutputs, scales.a);
  for_each_part(site, image, [&](std::size_t position) {
    const StoredMatrix b = b_of(layout, site, position, image.parts[position]);
    raise_maxima(b.data, b.dtype, b.n, b.k, ScaleAxis::kInputs, of_part(scales.b, image.parts[position]));
  });
  std::ranges::transform(scales.a, scales.a.begin(), int8_scale);
  std::ranges::transform(scales.b, scales.b.begin(), int8_scale);
  return scales;
}

}  // namespace

std::vector<float> ImageScales::products() const {
  std::vector<float> products(a.size());
  std::ranges::transform(a, b, products.begin(), std::multiplies{});
  return products;
}

std::optional<std::size_t> int8_image_bytes(const LoraLayout& layout, const LoraSite& site,
                                            std::span<const ModuleRank> modules) {
  if (!site.is_of_layer() || modules.empty()) return std::nullopt;
  bool all = true;
  const auto of_a = [&](std::int64_t total_rank, std::int64_t n, std::int64_t k) {
    const std::size_t bytes =
        aligned_bytes(int8_matrix_bytes(n, k)) + aligned_bytes(vector_bytes(total_rank));
    all = all && bytes < aligned_bytes(matrix_bytes(layout, n, k));
    return bytes;
  };
  const auto of_b = [&](std::size_t, std::size_t, std::int64_t n, std::int64_t k) {
    all = all && int8_matrix_bytes(n, k) < matrix_bytes(layout, n, k);
    return aligned_bytes(int8_matrix_bytes(n, k));
  };
  const std::size_t bytes = image_bytes(site, modules, of_a, of_b);
  if (!all) return std::nullopt;
  return bytes;
}

bool are_finite(std::span<const float> products) {
  return std::ranges::all_of(products, [](float scale) { return std::isfinite(scale); });
}

DeviceSite ImageRounder::round(const LoraLayout& layout, const LoraSite& site,
                               std::span<const ModuleRank> modules, const DeviceSite& image) {
  if (!int8_image_bytes(layout, site, modules)) return image;
  return round(layout, site, modules, find_scales(layout, site, image), image);
}

DeviceSite ImageRounder::round(const LoraLayout& layout, const LoraSite& site,
                               std::span<const ModuleRank> modules, const ImageScales& scales,
                               const DeviceSite& image) {
  const std::vector<float> products = scales.products();
  if (!int8_image_bytes(layout, site, modules) || !are_finite(products)) return image;
  DeviceSite result = image;
  const MatrixRows own = site.rows_of_a(image.total_rank);
  round(
      a_of(layout, site, image), ScaleAxis::kOutputs,
      std::span(scales.a).subspan(static_cast<std::size_t>(own.first), static_cast<std::size_t>(own.count)));
  result.a_storage = LoraStorage::kInt8;
  std::byte* const after_a = writable(image.a) + aligned_bytes(rounded_.size());
  std::memcpy(after_a, products.data(), vector_bytes(image.total_rank));
  result.rank_scales = reinterpret_cast<const float*>(after_a);
  for_each_part(site, image, [&](std::size_t position) {
    DevicePart& part = result.parts[position];
    round(b_of(layout, site, position, part), ScaleAxis::kInputs, of_part(scales.b, part));
    part.b_storage = LoraStorage::kInt8;
  });
  return result;
}

void ImageRounder::round(const StoredMatrix& matrix, ScaleAxis axis, std::span<const float> scales) {
  rounded_.resize(int8_matrix_bytes(matrix.n, matrix.k));
  if (rounded_.empty()) return;  // other ranks have all rows
  round_to_int8(matrix.data, matrix.dtype, matrix.n, matrix.k, axis, scales, rounded_.data());
  std::memcpy(writable(matrix.data), rounded_.data(), rounded_.size());
}

}  // namespace adaptrt
