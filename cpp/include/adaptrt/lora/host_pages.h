#pragma once

#include "adaptrt/core/huge_array.h"
#include "adaptrt/lora/adapter_pages.h"

namespace adaptrt {

/// Pages in host memory, in one reservation, for engines that compute there. The system allocates a page at
/// its first write, so pages that a cache only counts take no memory.
class HostPages final : public AdapterPages {
 public:
  /// Throws ConfigError if the memory cannot be reserved.
  HostPages(std::size_t page_bytes, std::int64_t num_pages);

  [[nodiscard]] std::size_t page_bytes() const override { return page_bytes_; }
  [[nodiscard]] std::int64_t num_pages() const override { return num_pages_; }
  [[nodiscard]] std::byte* address(std::int64_t page) const override {
    return memory_.data() + static_cast<std::size_t>(page) * page_bytes_;
  }
  [[nodiscard]] bool is_host_memory() const override { return true; }
  void load(std::span<const std::int64_t> pages, const Write& write) override;

 private:
  std::size_t page_bytes_;
  std::int64_t num_pages_;
  HugeArray memory_;
};

}  // namespace adaptrt
