#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace adaptrt {

/// Set of the device level's free pages.
class FreePages {
 public:
  explicit FreePages(std::int64_t total) : total_(total) {
    // The list never grows beyond this, so releasing pages cannot fail.
    free_.reserve(static_cast<std::size_t>(total));
    for (std::int64_t page = total; page-- > 0;) free_.push_back(page);
  }

  [[nodiscard]] std::int64_t total() const { return total_; }
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
  std::int64_t total_;
  std::vector<std::int64_t> free_;
};

}  // namespace adaptrt
