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

/// When a stream's work runs.
enum class StreamTime : std::uint8_t {
  kAtOnce,  ///< within the call
  kLate,    ///< when a caller waits for it, as late as on a real device
};

/// How a call fails.
enum class Failure : std::uint8_t {
  kOnce,     ///< StepError, once
  kForGood,  ///< EngineError, in this and every later call
  kLate,     ///< a copy that is never made: events after it, and the stream, throw StepError when awaited
};

class HostStream;

/// A Device in host memory. Throws std::logic_error for calls that would crash on a GPU, or that would be
/// slow there without an error: copies outside an allocation, use of freed memory, host memory that is not
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

  /// Makes calls of this name ("copy_to_device", "allocate", ...) fail after `successes` more successful
  /// calls.
  void fail(const std::string& call, Failure failure = Failure::kOnce, int successes = 0);
  /// Calls `hook` before a thread waits for an event; nothing runs before it returns.
  void before_event_waits(std::function<void()> hook);
  /// Refuses further pinned memory above this number of bytes, as a system does.
  void limit_pinned(std::size_t bytes);
  /// Number of calls of this name so far, over all streams.
  [[nodiscard]] std::int64_t calls(const std::string& call) const;
  /// True if [address, address + bytes) is in one live device allocation.
  [[nodiscard]] bool owns(const void* address, std::size_t bytes) const;
  /// Number of live allocations of both kinds.
  [[nodiscard]] std::size_t num_allocations() const;

 private:
  friend class HostStream;
  class Ledger;
  DeviceInfo info_;
  StreamTime time_;
  std::shared_ptr<Ledger> ledger_;
};

/// Returns the stream for a Stream::handle() of a HostDevice. Execution contexts and kernels submit their
/// work with submit(), so that it is captured and delayed like copies.
[[nodiscard]] HostStream& host_stream(void* handle);
void submit(HostStream& stream, std::function<void()> work);
[[nodiscard]] bool is_capturing(const HostStream& stream);

}  // namespace adaptrt::testing
