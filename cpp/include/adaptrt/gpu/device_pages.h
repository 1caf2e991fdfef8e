#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/lora/adapter_pages.h"

namespace adaptrt {

/// Pages in device memory. An adapter is packed into pinned host memory and copied on a separate stream, so
/// that loads and engine steps do not wait for each other.
class DevicePages final : public AdapterPages {
 public:
  /// Each copy stream runs one load at a time; further loads wait for a free stream. Throws ConfigError if
  /// the device cannot allocate the memory, StepError if the device fails.
  DevicePages(std::shared_ptr<Device> device, std::size_t page_bytes, std::int64_t num_pages,
              std::int32_t num_copy_streams);
  ~DevicePages() override;

  [[nodiscard]] std::size_t page_bytes() const override { return page_bytes_; }
  [[nodiscard]] std::int64_t num_pages() const override { return num_pages_; }
  [[nodiscard]] std::byte* address(std::int64_t page) const override {
    return memory_.data() + static_cast<std::size_t>(page) * page_bytes_;
  }
  /// Also throws ConfigError if pinned memory cannot be allocated for an adapter larger than any before.
  void load(std::span<const std::int64_t> pages, const Write& write) override;

 private:
  class Lane;
  class LaneLease;

  std::shared_ptr<Device> device_;
  std::size_t page_bytes_;
  std::int64_t num_pages_;
  Allocation memory_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::mutex mutex_;
  std::condition_variable lane_is_free_;
  std::vector<Lane*> free_lanes_;
};

}  // namespace adaptrt
