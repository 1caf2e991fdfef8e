#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "adaptrt/exec/executor.h"
#include "adaptrt/exec/response.h"

namespace adaptrt {

/// Why an executor stopped sending responses.
enum class ExecutorEnd : std::uint8_t { kShutdown, kDeath };

/// Passes responses from the executor's thread to waiting threads: one queue per request.
class ResponseBoard {
 public:
  using Timeout = std::optional<std::chrono::nanoseconds>;

  void open(const std::vector<RequestId>& ids);
  /// Undoes open() for requests that were not queued.
  void discard(const std::vector<RequestId>& ids);
  void post(Response response);
  /// Wakes all threads. From now on waiting throws ExecutorClosedError(reason) if no response is ready.
  /// Exception: await_any() returns none after a shutdown.
  void close(const std::string& reason, ExecutorEnd end);

  /// See Executor::await_responses.
  [[nodiscard]] std::vector<Response> await_any(Timeout timeout);
  [[nodiscard]] std::vector<Response> await(RequestId id, Timeout timeout);
  /// Returns nullopt, and takes nothing, if at the timeout not every id has a response.
  [[nodiscard]] std::optional<std::vector<std::vector<Response>>> await_each(
      const std::vector<RequestId>& ids, Timeout timeout, AtTimeout at_timeout);
  [[nodiscard]] std::size_t num_ready(std::optional<RequestId> id) const;

 private:
  struct Channel {
    std::vector<Response> responses;
    std::condition_variable changed;
    bool is_done = false;  // its last response was taken
  };

  /// Returns nullptr for a request that has ended. Throws RequestError for an unknown id.
  [[nodiscard]] std::shared_ptr<Channel> find(RequestId id) const;
  void take(RequestId id, Channel& channel, std::vector<Response>& responses);

  mutable std::mutex mutex_;
  std::condition_variable any_changed_;
  std::map<RequestId, std::shared_ptr<Channel>> channels_;
  std::set<RequestId> ready_;
  RequestId last_id_ = 0;  // highest id that was opened
  std::optional<std::string> closed_;
  ExecutorEnd end_ = ExecutorEnd::kDeath;
};

}  // namespace adaptrt
