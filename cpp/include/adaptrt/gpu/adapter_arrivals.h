#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// Copies of one adapter that were enqueued. Thread-safe after the last add().
class AdapterArrival {
 public:
  /// Records a point after the copies of the sites from load_position() `position` on. Positions ascend.
  void add(std::int32_t position, std::unique_ptr<Event> copied, Stream& stream);
  /// Later work of `stream` waits for the sites up to `position`.
  void await(std::int32_t position, Stream& stream) const;
  /// Later work of `stream` waits for all sites.
  void await_all(Stream& stream) const;
  /// Waits for all sites. Throws as Event::synchronize().
  void synchronize() const;

 private:
  struct Part {
    std::int32_t position = 0;
    std::unique_ptr<Event> copied;
  };
  std::vector<Part> parts_;
};

/// The adapters whose copies may still run, by DeviceAdapter::load_id. An engine and its pages share it.
/// Thread-safe.
class AdapterArrivals {
 public:
  void add(std::uint64_t load_id, std::shared_ptr<const AdapterArrival> arrival);
  void remove(std::uint64_t load_id) noexcept;
  /// Returns nullptr if all copies of the adapter are done.
  [[nodiscard]] std::shared_ptr<const AdapterArrival> find(std::uint64_t load_id) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const AdapterArrival>> arrivals_;
};

}  // namespace adaptrt
