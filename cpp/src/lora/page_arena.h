#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/huge_array.h"

namespace adaptrt {

/// The device level's memory: one reservation cut into pages, with the list of the free ones. The system
/// gives memory to a page when it is first written, so a cache that nobody uses costs none.
class PageArena {
 public:
  /// Throws ConfigError when the system refuses the reservation.
  PageArena(std::size_t page_bytes, std::int64_t num_pages);

  [[nodiscard]] std::size_t page_bytes() const { return page_bytes_; }
  [[nodiscard]] std::int64_t total() const { return total_; }
  [[nodiscard]] std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }
  [[nodiscard]] const std::vector<std::int64_t>& free_pages() const { return free_; }

  /// A free page, the one given back last first: its memory is warm. There must be one.
  [[nodiscard]] std::int64_t take() noexcept;
  void give_back(std::int64_t page) noexcept;
  [[nodiscard]] std::byte* address(std::int64_t page) const;

 private:
  std::size_t page_bytes_;
  std::int64_t total_;
  HugeArray memory_;
  std::vector<std::int64_t> free_;
};

}  // namespace adaptrt
