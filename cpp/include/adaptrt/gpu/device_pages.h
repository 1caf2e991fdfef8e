#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/gpu/adapter_arrivals.h"
#include "adaptrt/gpu/pinned_slabs.h"
#include "adaptrt/lora/adapter_pages.h"

namespace adaptrt {

/// Pages in device memory. Adapters are copied on separate streams, from the pinned memory in which the host
/// level keeps them. An adapter in other memory is packed into pinned staging memory page by page, while the
/// page before is copied.
class DevicePages final : public AdapterPages {
 public:
  /// Each copy stream runs one load at a time; further loads wait for a free stream. `arrivals` has the
  /// adapters whose copies run. Throws ConfigError if the device cannot allocate the memory, StepError if the
  /// device fails.
  DevicePages(std::shared_ptr<Device> device, std::size_t page_bytes, std::int64_t num_pages,
              std::int32_t num_copy_streams,
              std::shared_ptr<AdapterArrivals> arrivals = std::make_shared<AdapterArrivals>());
  ~DevicePages() override;

  [[nodiscard]] std::size_t page_bytes() const override { return page_bytes_; }
  [[nodiscard]] std::int64_t num_pages() const override { return num_pages_; }
  [[nodiscard]] std::byte* address(std::int64_t page) const override {
    return memory_.data() + static_cast<std::size_t>(page) * page_bytes_;
  }
  /// Also throws ConfigError if pinned memory cannot be allocated for an adapter larger than any before.
  void load(std::span<const std::int64_t> pages, const Write& write) override;
  [[nodiscard]] std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes,
                                                           std::size_t max_bytes) override {
    return slabs_->allocate(bytes, max_bytes);
  }
  [[nodiscard]] std::size_t pinned_bytes() const override { return slabs_->bytes(); }
  [[nodiscard]] std::unique_ptr<Copies> begin_copies(std::uint64_t load_id,
                                                     std::span<const Copy> copies) override;

 private:
  class Lane;
  class LaneLease;
  class LaneCopies;

  std::shared_ptr<Device> device_;
  std::size_t page_bytes_;
  std::int64_t num_pages_;
  std::shared_ptr<AdapterArrivals> arrivals_;
  std::shared_ptr<PinnedSlabs> slabs_;
  Allocation memory_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::mutex mutex_;
  std::condition_variable lane_is_free_;
  std::vector<Lane*> free_lanes_;
};

}  // namespace adaptrt
