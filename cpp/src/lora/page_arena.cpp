#include "page_arena.h"

#include <limits>
#include <new>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {

PageArena::PageArena(std::size_t page_bytes, std::int64_t num_pages)
    : page_bytes_(page_bytes), total_(num_pages) {
  if (num_pages == 0) return;
  const auto pages = static_cast<std::size_t>(num_pages);
  if (page_bytes > std::numeric_limits<std::size_t>::max() / pages) {
    throw ConfigError("the LoRA cache's device level of " + std::to_string(num_pages) + " pages of " +
                      std::to_string(page_bytes) + " bytes is larger than the address space");
  }
  const std::size_t bytes = page_bytes * pages;
  try {
    memory_ = HugeArray(bytes);
    // The list never grows beyond this, so giving pages back cannot fail.
    free_.reserve(pages);
  } catch (const std::bad_alloc&) {
    throw ConfigError("the system refuses " + std::to_string(bytes) +
                      " bytes for the LoRA cache's device level");
  }
  for (std::int64_t page = num_pages; page-- > 0;) free_.push_back(page);
}

std::int64_t PageArena::take() noexcept {
  const std::int64_t page = free_.back();
  free_.pop_back();
  return page;
}

void PageArena::give_back(std::int64_t page) noexcept {
  free_.push_back(page);
}

std::byte* PageArena::address(std::int64_t page) const {
  return memory_.data() + static_cast<std::size_t>(page) * page_bytes_;
}

}  // namespace adaptrt
