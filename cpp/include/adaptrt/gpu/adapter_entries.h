#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// True if a site is a linear layer of an expert, or of a head of latent attention. Its rows are a token's
/// slots: see cuda/slot_tile.h.
[[nodiscard]] bool is_of_slots(const LoraSite& site);

/// The places of a layout's parts in a slot of AdapterArrays, which has rows() * kNumLoraModules entries.
///
/// A part has the entry of its module in its layer's row. Slices of the vocabulary have the rows with their
/// numbers. Parts of experts and of heads follow after these rows, in the order of the sites: a row for each
/// would be mostly empty. So do modules from kNumLoraModules on, which have no place in a row.
class AdapterEntries {
 public:
  explicit AdapterEntries(const LoraLayout& layout);

  [[nodiscard]] std::int32_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t count() const;
  /// Returns the entry of a part of LoraLayout::sites[site].
  [[nodiscard]] std::int64_t entry(std::size_t site, std::size_t part) const {
    return entries_[site].at(part);
  }

 private:
  std::int32_t rows_;
  std::vector<std::array<std::int64_t, kMaxPartsPerSite>> entries_;
};

}  // namespace adaptrt
