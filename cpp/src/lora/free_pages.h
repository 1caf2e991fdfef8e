#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace adaptrt {

/// Set of the device level's free pages.
class FreePages {
 public:
  /// `total` of `most` pages are in use at first.
  FreePages(std::int64_t total, std::int64_t most) : most_(most) {
    // The list never grows beyond this, so releasing pages cannot fail.
    free_.reserve(static_cast<std::size_t>(most));
    grow(total);
  }

  /// Brings more pages into use, if the level has fewer than `total` pages.
  void grow(std::int64_t total) noexcept {
    total = std::min(total, most_);
    for (std::int64_t page = total; page-- > total_;) free_.push_back(page);
    total_ = std::max(total_, total);
  }

  [[nodiscard]] std::int64_t total() const { return total_; }
  /// Number of pages up to which the level grows.
  [[nodiscard]] std::int64_t most() const { return most_; }
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(free_.size()); }
  [[nodiscard]] const std::vector<std::int64_t>& pages() const { return free_; }

  /// Returns a free page, last released first, because its memory is warm. One must exist.
  [[nodiscard]] std::int64_t take() noexcept {
    const std::int64_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void give_back(std::int64_t page) noexcept { free_.push_back(page); }

 private:
  std::int64_t total_ = 0;
  std::int64_t most_;
  std::vector<std::int64_t> free_;
};

}  // namespace adaptrt
