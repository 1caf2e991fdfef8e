#pragma once

#include <memory>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// An NVIDIA GPU, used through the CUDA runtime. Each call makes it the calling thread's current GPU.
class CudaDevice final : public Device {
 public:
  /// Throws ConfigError with the missing part: the driver, a newer driver, any GPU, or GPU `index`.
  explicit CudaDevice(int index);

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  [[nodiscard]] DeviceMemoryInfo memory() const override;
  [[nodiscard]] Allocation allocate(std::size_t bytes) override;
  [[nodiscard]] Allocation allocate_pinned(std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Stream> make_stream() override;
  [[nodiscard]] std::unique_ptr<Event> make_event() override;

 private:
  int index_;
  DeviceInfo info_;
};

}  // namespace adaptrt
