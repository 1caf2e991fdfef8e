#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "adaptrt/device/device.h"

namespace adaptrt::cuda {

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(int device);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void synchronize() override;
  [[nodiscard]] cudaEvent_t handle() const { return event_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

class CudaStream final : public Stream {
 public:
  explicit CudaStream(int device);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  [[nodiscard]] void* handle() const override { return stream_; }
  void copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) override;
  void copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) override;
  void copy_on_device(std::byte* to, const std::byte* from, std::size_t bytes) override;
  void fill_zero(std::byte* device, std::size_t bytes) override;
  void record(Event& event) override;
  void wait(Event& event) override;
  void synchronize() override;
  [[nodiscard]] std::unique_ptr<CapturedGraph> capture(const std::function<void()>& work) override;
  void launch(CapturedGraph& graph) override;

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace adaptrt::cuda
