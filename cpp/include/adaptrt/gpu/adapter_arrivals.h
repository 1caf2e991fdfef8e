#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// Copies of one adapter to the device that were enqueued, in parts. Thread-safe after the last add().
class AdapterArrival {
 public:
  struct Part {
    std::int32_t position = 0;  ///< load_position() of its first site
    std::unique_ptr<Event> copied;
  };

  /// Adds a part whose copies were just enqueued on `stream`. Positions ascend.
  void add(std::int32_t position, std::unique_ptr<Event> copied, Stream& stream);
  [[nodiscard]] std::span<const Part> parts() const { return parts_; }
  /// Waits for all parts. Throws if a copy failed; later calls then throw the same.
  void synchronize() const;
  [[nodiscard]] bool has_failed() const;

 private:
  std::vector<Part> parts_;
  mutable std::mutex mutex_;
  mutable std::exception_ptr failure_;
};

/// The adapters whose copies may still run, by DeviceAdapter::load_id. An engine and its pages share it.
/// Thread-safe.
class AdapterArrivals {
 public:
  void add(std::uint64_t load_id, std::shared_ptr<const AdapterArrival> arrival);
  void remove(std::uint64_t load_id) noexcept;
  [[nodiscard]] bool is_empty() const;
  /// Returns nullptr if all copies of the adapter are done.
  [[nodiscard]] std::shared_ptr<const AdapterArrival> find(std::uint64_t load_id) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const AdapterArrival>> arrivals_;
};

/// The arrivals that the work of one step reads.
using StepArrivals = std::vector<std::shared_ptr<const AdapterArrival>>;

/// Lets the work of a stream wait for the parts that it reads, each once.
class ArrivalWaits {
 public:
  /// Both must outlive the object.
  ArrivalWaits(const StepArrivals& arrivals, Stream& stream)
      : arrivals_(arrivals), stream_(stream), awaited_(arrivals.size()) {}

  /// Later work of the stream may read the sites up to this load_position().
  void await(std::int32_t position);
  /// Later work of the stream may read all sites.
  void await_all();

 private:
  /// Waits for the first `parts` parts of an arrival.
  void await_parts(std::size_t arrival, std::size_t parts);

  const StepArrivals& arrivals_;
  Stream& stream_;
  std::vector<std::size_t> awaited_;  ///< number of parts, of each arrival
};

}  // namespace adaptrt
