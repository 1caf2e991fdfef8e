#include "adaptrt/lora/host_pages.h"

#include <limits>
#include <new>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {

HostPages::HostPages(std::size_t page_bytes, std::int64_t num_pages)
    : page_bytes_(page_bytes), num_pages_(num_pages) {
  if (num_pages == 0) return;
  const auto pages = static_cast<std::size_t>(num_pages);
  if (page_bytes > std::numeric_limits<std::size_t>::max() / pages) {
    throw ConfigError("the LoRA cache's device level of " + std::to_string(num_pages) + " pages of " +
                      std::to_string(page_bytes) + " bytes is larger than the address space");
  }
  try {
    memory_ = HugeArray(page_bytes * pages);
  } catch (const std::bad_alloc&) {
    throw ConfigError("the system refuses " + std::to_string(page_bytes * pages) +
                      " bytes for the LoRA cache's device level");
  }
}

void HostPages::load(std::span<const std::int64_t> pages, const Write& write) {
  for (std::size_t i = 0; i < pages.size(); ++i) write(i, address(pages[i]));
}

std::unique_ptr<AdapterPages::Copies> AdapterPages::begin_copies(std::uint64_t /*load_id*/,
                                                                 std::span<const Copy> /*copies*/) {
  throw EngineError("these pages have no pinned memory to copy from");
}

}  // namespace adaptrt
