#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"

namespace adaptrt {

struct AdapterRow;

// A packed adapter has one image per site that it changes; a row of experts has one per expert:
//
//   A of its modules there: [total_rank, in] | per part: B[out, rank]
//   | per part with DoRA: float32[out] magnitudes | per part with a shift: float32[out]
//
// A and B have the engine's type and the layout's MatrixLayout; each piece starts at a multiple of
// kImageAlignment. If ranks share A or B, each rank's image has only its rows, but all images have the size
// of the largest. An image lies within one page.
inline constexpr std::size_t kImageAlignment = 64;

/// The rank of a module at a site, before it is placed in the site's image: A[rank, in], B[out, rank].
struct ModuleRank {
  LoraModule module = LoraModule::kAttnQ;
  std::int32_t rank = 0;
  RowVectors vectors = {};
  /// AdapterRow::shares_a.
  bool shares_a = false;
};

/// Bytes of the image of these modules at a site of `layout`.
[[nodiscard]] std::size_t image_bytes(const LoraLayout& layout, const LoraSite& site,
                                      std::span<const ModuleRank> modules);

/// A place in an adapter's pages; `page` counts from 0 within the adapter.
struct ImagePlace {
  std::int64_t page = 0;
  std::size_t offset = 0;
};

struct ImagePlaces {
  std::vector<ImagePlace> places;
  /// Bytes of the images in each page.
  std::vector<std::size_t> used_bytes;
};

/// Places images by first fit, in order. No size may be larger than page_bytes.
[[nodiscard]] ImagePlaces place_images(std::span<const std::size_t> sizes, std::size_t page_bytes);

/// Positions of an adapter's parts when it is packed, on a rank of stage LoraLayout::stage of a pipeline.
struct DevicePlan {
  struct Site {
    std::int32_t site = 0;
    /// Indices of the adapter's rows, in the order of their columns of A.
    std::vector<std::size_t> rows;
    ImagePlace place;
  };
  std::vector<Site> sites;
  /// Number of pages of the stage that needs the most, so that all ranks use the same number.
  std::int64_t pages = 0;
  /// Bytes of the images in each page of this stage, which may have fewer pages.
  std::vector<std::size_t> used_bytes;

  /// Bytes of all images.
  [[nodiscard]] std::size_t bytes() const;
};

/// Makes the plan of an adapter with these rows, which were checked for `layout`. `sizes`:
/// StoredParts::image_bytes; empty: images are exact.
[[nodiscard]] DevicePlan plan_device_images(std::span<const AdapterRow> rows, const LoraLayout& layout,
                                            const SiteIndex& index, std::size_t page_bytes,
                                            std::span<const std::uint64_t> sizes = {});

}  // namespace adaptrt
