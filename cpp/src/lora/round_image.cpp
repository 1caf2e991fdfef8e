#include "round_image.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "adaptrt/core/int8_matrix.h"
#include "image_sizes.h"

namespace adaptrt {
namespace {

/// The image belongs to the caller, but DeviceSite has the addresses that kernels read.
std::byte* writable(const std::byte* address) {
  return const_cast<std::byte*>(address);
}

}  // namespace

DeviceSite ImageRounder::round(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image) {
  if (!site.is_of_layer() || image.total_rank == 0 || !becomes_smaller(layout, site, image)) return image;
  find_scales(layout, site, image);
  // Only values that leave the range of float32 in exact products as well have such scales.
  if (!std::ranges::all_of(products_, [](float scale) { return std::isfinite(scale); })) return image;
  DeviceSite result = image;
  const auto replace = [&](const std::byte* matrix, std::int64_t n, std::int64_t k, ScaleAxis axis,
                           std::span<const float> scales) {
    rounded_.resize(int8_matrix_bytes(n, k));
    round_to_int8(matrix, layout.dtype, n, k, axis, scales, rounded_.data());
    std::memcpy(writable(matrix), rounded_.data(), rounded_.size());
  };
  replace(image.a, image.total_rank, site.in_size, ScaleAxis::kOutputs, a_scales_);
  result.a_storage = LoraStorage::kInt8;
  std::byte* const scales = writable(image.a) + aligned_bytes(rounded_.size());
  std::memcpy(scales, products_.data(), vector_bytes(image.total_rank));
  result.rank_scales = reinterpret_cast<const float*>(scales);
  for_each_part(site, image, [&](std::size_t position, std::int64_t outputs) {
    DevicePart& part = result.parts[position];
    replace(part.b, outputs, part.rank, ScaleAxis::kInputs, b_scales_of(part));
    part.b_storage = LoraStorage::kInt8;
  });
  return result;
}

template <class Visit>
void ImageRounder::for_each_part(const LoraSite& site, const DeviceSite& image, const Visit& visit) {
  for (std::size_t i = 0; i < site.parts.size(); ++i) {
    if (image.parts[i].rank > 0) visit(i, site.parts[i].out_size);
  }
}

bool ImageRounder::becomes_smaller(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image) {
  const std::size_t a_and_scales = aligned_bytes(int8_matrix_bytes(image.total_rank, site.in_size)) +
                                   aligned_bytes(vector_bytes(image.total_rank));
  bool all = a_and_scales < aligned_bytes(matrix_bytes(layout, image.total_rank, site.in_size));
  for_each_part(site, image, [&](std::size_t position, std::int64_t outputs) {
    const std::int64_t rank = image.parts[position].rank;
    all = all && int8_matrix_bytes(outputs, rank) < matrix_bytes(layout, outputs, rank);
  });
  return all;
}

void ImageRounder::find_scales(const LoraLayout& layout, const LoraSite& site, const DeviceSite& image) {
  const auto rank = static_cast<std::size_t>(image.total_rank);
  a_scales_.assign(rank, 0.0F);
  b_scales_.assign(rank, 0.0F);
  raise_maxima(image.a, layout.dtype, image.total_rank, site.in_size, ScaleAxis::kOutputs, a_scales_);
  for_each_part(site, image, [&](std::size_t position, std::int64_t outputs) {
    const DevicePart& part = image.parts[position];
    const std::span<float> maxima = std::span(b_scales_).subspan(static_cast<std::size_t>(part.rank_offset),
                                                                 static_cast<std::size_t>(part.rank));
    raise_maxima(part.b, layout.dtype, outputs, part.rank, ScaleAxis::kInputs, maxima);
  });
  std::ranges::transform(a_scales_, a_scales_.begin(), int8_scale);
  std::ranges::transform(b_scales_, b_scales_.begin(), int8_scale);
  products_.resize(rank);
  std::ranges::transform(a_scales_, b_scales_, products_.begin(), std::multiplies{});
}

std::span<const float> ImageRounder::b_scales_of(const DevicePart& part) const {
  return std::span(b_scales_).subspan(static_cast<std::size_t>(part.rank_offset),
                                      static_cast<std::size_t>(part.rank));
}

}  // namespace adaptrt
