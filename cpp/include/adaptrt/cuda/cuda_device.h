#pragma once

#include <memory>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// An NVIDIA GPU through the CUDA runtime. Each call makes the GPU the calling thread's current one.
class CudaDevice final : public Device {
 public:
  /// Throws ConfigError that says what is missing: the driver, a newer driver, a GPU, or this one of them.
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
