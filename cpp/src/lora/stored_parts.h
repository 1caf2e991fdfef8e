#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"
#include "image_writer.h"
#include "round_image.h"

namespace adaptrt {

/// Finds how ranks store their parts of an adapter whose whole rows are in `source`.
[[nodiscard]] StoredParts find_stored_parts(LoraStorage storage, const SourceRows& source,
                                            const LoraLayout& layout, const SiteIndex& index);

/// Where StoredParts::scales has those of each row.
class ScalePlaces {
 public:
  explicit ScalePlaces(std::span<const AdapterRow> rows);

  [[nodiscard]] std::size_t count() const { return count_; }
  /// Place of the scales [rank] of A's rows, or of B's columns.
  [[nodiscard]] std::size_t of_a(std::size_t row, std::int64_t expert) const;
  [[nodiscard]] std::size_t of_b(std::size_t row, std::int64_t expert) const;
  /// The scales of the image of one expert, or of a layer without experts, for the rows that it is made of.
  [[nodiscard]] ImageScales of_image(std::span<const float> scales, std::span<const std::size_t> rows_here,
                                     std::int64_t expert) const;

 private:
  std::span<const AdapterRow> rows_;
  std::vector<std::size_t> firsts_;
  std::size_t count_ = 0;
};

}  // namespace adaptrt
