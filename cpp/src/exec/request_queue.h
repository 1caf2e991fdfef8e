#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "active_request.h"

namespace adaptrt {

/// Work for the executor's thread: new requests, cancellations, the stop. Counts all requests that have not
/// started.
class RequestQueue {
 public:
  explicit RequestQueue(std::optional<std::int32_t> max_queue_size) : max_queue_size_(max_queue_size) {}

  /// Reserves places in the queue. Throws QueueFullError or ExecutorClosedError.
  void reserve(std::size_t count);
  /// Releases places, of requests that have started or ended before their start.
  void release(std::size_t count);
  /// Submits requests with reserved places. Throws ExecutorClosedError and then submits none.
  void submit(std::vector<std::unique_ptr<ActiveRequest>>& requests);
  void cancel(RequestId id);
  /// Makes the next take() return at once, because something else has changed.
  void wake();
  /// Asks for a reset of the prefix cache. Throws ExecutorClosedError.
  void reset_prefix_cache();
  /// Asks the executor's thread to stop.
  void stop();
  /// Closes the queue; the first reason stays.
  void close(const std::string& reason);
  /// Throws ExecutorClosedError with the reason if closed.
  void throw_if_closed() const;
  [[nodiscard]] bool is_open() const;
  [[nodiscard]] bool has_room() const;
  [[nodiscard]] std::size_t num_queued() const;

  struct Work {
    std::vector<std::unique_ptr<ActiveRequest>> arrivals;
    std::vector<RequestId> cancelled;
    bool stop = false;
    bool woken = false;
    bool resets_prefix_cache = false;
  };
  /// Returns all work that has arrived. With `wait`, waits until there is some, wake() is called, or `until`
  /// has passed.
  [[nodiscard]] Work take(bool wait, std::optional<Clock::time_point> until = std::nullopt);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::int32_t> max_queue_size_;
  std::size_t num_queued_ = 0;
  Work work_;
  std::optional<std::string> closed_;
};

}  // namespace adaptrt
