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

/// Pages in a device's memory. An adapter is packed into pinned host memory and copied by a stream of its
/// own, so that loads neither wait for the engine's steps nor hold them up.
class DevicePages final : public AdapterPages {
 public:
  /// As many loads run at a time as there are copy streams; others wait for one. Throws ConfigError when the
  /// device refuses the memory, StepError when it fails.
  DevicePages(std::shared_ptr<Device> device, std::size_t page_bytes, std::int64_t num_pages,
              std::int32_t num_copy_streams);
  ~DevicePages() override;

  [[nodiscard]] std::size_t page_bytes() const override { return page_bytes_; }
  [[nodiscard]] std::int64_t num_pages() const override { return num_pages_; }
  [[nodiscard]] std::byte* address(std::int64_t page) const override {
    return memory_.data() + static_cast<std::size_t>(page) * page_bytes_;
  }
  /// Throws ConfigError as well, when the system refuses pinned memory for an adapter larger than any before.
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
