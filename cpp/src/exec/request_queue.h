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

/// What callers want of the executor's thread: new requests, cancellations, the end. Counts the requests that
/// have not started, wherever they are.
class RequestQueue {
 public:
  explicit RequestQueue(std::optional<std::int32_t> max_queue_size) : max_queue_size_(max_queue_size) {}

  /// Places in the queue. Throws QueueFullError, ExecutorClosedError.
  void reserve(std::size_t count);
  /// Gives places back: of requests that have started, or that ended before.
  void release(std::size_t count);
  /// Hands over requests with reserved places. Throws ExecutorClosedError; nothing is handed over then.
  void submit(std::vector<std::unique_ptr<ActiveRequest>>& requests);
  void cancel(RequestId id);
  /// Makes the next take() return at once: something else has changed that the executor's thread waits for.
  void wake();
  /// Asks the executor's thread to stop.
  void stop();
  /// Nothing can be queued from now on; the first reason stays.
  void close(const std::string& reason);
  /// Throws ExecutorClosedError(reason) when closed.
  void throw_if_closed() const;
  [[nodiscard]] bool is_open() const;
  [[nodiscard]] bool has_room() const;
  [[nodiscard]] std::size_t num_queued() const;

  struct Work {
    std::vector<std::unique_ptr<ActiveRequest>> arrivals;
    std::vector<RequestId> cancelled;
    bool stop = false;
    bool woken = false;
  };
  /// All that has come in; with `wait`, not before something has, wake() was called, or `until` is over.
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
