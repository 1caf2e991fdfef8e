#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace adaptrt {

/// Memory that its destructor frees: device memory, or host memory that a device copies from and to.
class Allocation {
 public:
  Allocation() = default;
  /// `owner` frees the memory when its last copy is destroyed.
  Allocation(std::shared_ptr<void> owner, std::size_t bytes) : owner_(std::move(owner)), bytes_(bytes) {}

  /// Returns a device or host address, depending on the memory; nullptr if empty.
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(owner_.get()); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> owner_;
  std::size_t bytes_ = 0;
};

struct DeviceInfo {
  std::string name;  ///< "NVIDIA H100 80GB HBM3"
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
};

struct DeviceMemoryInfo {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

/// A point in a stream's work.
class Event {
 public:
  virtual ~Event() = default;
  /// Blocks until the work before the point is done; returns at once if the event was never recorded.
  virtual void synchronize() = 0;
};

/// Work that was captured once and can be launched many times.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
};

/// A queue of device work that runs in order. One thread at a time. Every call throws StepError for a device
/// error, from this call or from earlier work. It throws EngineError if the device is unusable after the
/// error.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Returns the native handle for kernels and execution contexts (a cudaStream_t).
  [[nodiscard]] virtual void* handle() const = 0;
  /// Both copies return at once if the host memory is pinned; it must not change before the copy is done.
  virtual void copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) = 0;
  virtual void copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) = 0;
  /// The two ranges must not overlap.
  virtual void copy_on_device(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void fill_zero(std::byte* device, std::size_t bytes) = 0;
  virtual void record(Event& event) = 0;
  /// Later work of this stream waits for the event.
  virtual void wait(Event& event) = 0;
  virtual void synchronize() = 0;
  /// Captures the work that `work` puts into this stream, without running it. Rethrows what `work` throws and
  /// then drops the capture.
  [[nodiscard]] virtual std::unique_ptr<CapturedGraph> capture(const std::function<void()>& work) = 0;
  virtual void launch(CapturedGraph& graph) = 0;
};

/// A device with memory of its own. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual const DeviceInfo& info() const = 0;
  [[nodiscard]] virtual DeviceMemoryInfo memory() const = 0;
  /// Memory on the device, aligned to 256 bytes. Throws ConfigError, with the bytes asked for and free.
  [[nodiscard]] virtual Allocation allocate(std::size_t bytes) = 0;
  /// Allocates host memory that the device can access while it does other work. Throws ConfigError.
  [[nodiscard]] virtual Allocation allocate_pinned(std::size_t bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream() = 0;
  [[nodiscard]] virtual std::unique_ptr<Event> make_event() = 0;
};

}  // namespace adaptrt
