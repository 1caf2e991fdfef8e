#include "adaptrt/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <string>

#include "adaptrt/core/error.h"
#include "cuda_status.h"
#include "cuda_stream.h"

namespace adaptrt {
namespace {

using cuda::activate;
using cuda::describe;

/// Formats 13000 as "13.0".
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

[[noreturn]] void refuse_driver(cudaError_t status) {
  int driver = 0;
  int runtime = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  const std::string said = " [" + describe("cudaGetDeviceCount", status) + "]";
  if (driver == 0) {
    throw ConfigError(
        "there is no NVIDIA driver on this machine (libcuda.so.1 was not found); this build needs one for "
        "CUDA " +
        version_text(runtime) + " or newer" + said);
  }
  throw ConfigError("the NVIDIA driver is too old: it is for CUDA " + version_text(driver) +
                    ", this build needs one for CUDA " + version_text(runtime) + " or newer" + said);
}

int count_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  static_cast<void>(cudaGetLastError());
  if (status == cudaErrorInsufficientDriver) refuse_driver(status);
  if (status == cudaErrorNoDevice || status == cudaSuccess) {
    throw ConfigError("the NVIDIA driver finds no GPU; CUDA_VISIBLE_DEVICES may hide it [" +
                      describe("cudaGetDeviceCount", status) + "]");
  }
  throw ConfigError("the GPUs cannot be used [" + describe("cudaGetDeviceCount", status) + "]");
}

/// Lists the GPUs for messages: "0 (NVIDIA H200), 1 (NVIDIA H200)".
std::string list_devices(int count) {
  std::string text;
  for (int index = 0; index < count; ++index) {
    text.append(index == 0 ? "" : ", ").append(std::to_string(index));
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) {
      text.append(" (").append(properties.name).append(")");
    } else {
      static_cast<void>(cudaGetLastError());
    }
  }
  return text;
}

/// The device's memory, for messages.
std::string memory_text(const Device& device) {
  try {
    const DeviceMemoryInfo memory = device.memory();
    return std::to_string(memory.free_bytes) + " of " + std::to_string(memory.total_bytes) +
           " bytes are free";
  } catch (const AdaptrtError& error) {
    return error.what();
  }
}

}  // namespace

CudaDevice::CudaDevice(int index) : index_(index) {
  const int count = count_devices();
  if (index < 0 || index >= count) {
    throw ConfigError("there is no GPU " + std::to_string(index) + "; accepted: " + list_devices(count));
  }
  const auto require = [&](const char* call, cudaError_t status) {
    if (status == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    throw ConfigError("GPU " + std::to_string(index) + " cannot be used [" + describe(call, status) + "]");
  };
  cudaDeviceProp properties{};
  require("cudaSetDevice", cudaSetDevice(index));
  require("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, index));
  info_ = {properties.name, properties.major, properties.minor};
}

DeviceMemoryInfo CudaDevice::memory() const {
  activate(index_);
  DeviceMemoryInfo memory;
  cuda::check("cudaMemGetInfo", cudaMemGetInfo(&memory.free_bytes, &memory.total_bytes));
  return memory;
}

Allocation CudaDevice::allocate(std::size_t bytes) {
  if (bytes == 0) return {};
  activate(index_);
  void* address = nullptr;
  const cudaError_t status = cudaMalloc(&address, bytes);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw ConfigError("GPU " + std::to_string(index_) + " gives no " + std::to_string(bytes) + " bytes; " +
                      memory_text(*this) + " [" + describe("cudaMalloc", status) + "]");
  }
  return {std::shared_ptr<void>(address, [](void* memory) { static_cast<void>(cudaFree(memory)); }), bytes};
}

Allocation CudaDevice::allocate_pinned(std::size_t bytes) {
  if (bytes == 0) return {};
  activate(index_);
  void* address = nullptr;
  const cudaError_t status = cudaMallocHost(&address, bytes);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw ConfigError("the system gives no " + std::to_string(bytes) + " bytes of pinned memory [" +
                      describe("cudaMallocHost", status) + "]");
  }
  return {std::shared_ptr<void>(address, [](void* memory) { static_cast<void>(cudaFreeHost(memory)); }),
          bytes};
}

std::unique_ptr<Stream> CudaDevice::make_stream() {
  return std::make_unique<cuda::CudaStream>(index_);
}

std::unique_ptr<Event> CudaDevice::make_event() {
  return std::make_unique<cuda::CudaEvent>(index_);
}

}  // namespace adaptrt
