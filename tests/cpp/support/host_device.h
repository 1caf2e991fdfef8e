#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "adaptrt/device/device.h"

namespace adaptrt::testing {

/// When a stream's work is done.
enum class StreamTime : std::uint8_t {
  kAtOnce,  ///< within the call
  kLate,    ///< when somebody waits for it, as late as a real device may
};

/// How a call fails.
enum class Failure : std::uint8_t {
  kOnce,     ///< StepError, this time
  kForGood,  ///< EngineError, now and in every later call of any name
};

class HostStream;

/// A Device in host memory. It throws std::logic_error for what a GPU would not survive or what would be slow
/// there without a word: copies that leave an allocation, that use freed memory, or whose host side is not
/// pinned.
class HostDevice final : public Device {
 public:
  explicit HostDevice(std::size_t total_bytes = std::size_t{1} << 32, StreamTime time = StreamTime::kAtOnce);
  ~HostDevice() override;

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  [[nodiscard]] DeviceMemoryInfo memory() const override;
  [[nodiscard]] Allocation allocate(std::size_t bytes) override;
  [[nodiscard]] Allocation allocate_pinned(std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Stream> make_stream() override;
  [[nodiscard]] std::unique_ptr<Event> make_event() override;

  /// The call of this name ("copy_to_device", "allocate", ...) fails after `successes` more of it.
  void fail(const std::string& call, Failure failure = Failure::kOnce, int successes = 0);
  /// Calls of this name so far, of all streams.
  [[nodiscard]] std::int64_t calls(const std::string& call) const;
  /// Whether [address, address + bytes) lies in one living allocation of the device.
  [[nodiscard]] bool owns(const void* address, std::size_t bytes) const;
  /// Allocations of either kind that are alive.
  [[nodiscard]] std::size_t num_allocations() const;

 private:
  friend class HostStream;
  class Ledger;
  DeviceInfo info_;
  StreamTime time_;
  std::shared_ptr<Ledger> ledger_;
};

/// The stream that a Stream::handle() of a HostDevice names. Work of execution contexts and kernels goes
/// through submit(), so that it is captured and delayed as copies are.
[[nodiscard]] HostStream& host_stream(void* handle);
void submit(HostStream& stream, std::function<void()> work);
[[nodiscard]] bool is_capturing(const HostStream& stream);

}  // namespace adaptrt::testing
