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

/// Why an executor gives no more responses.
enum class ExecutorEnd : std::uint8_t { kShutdown, kDeath };

/// Where the executor's thread leaves responses and other threads wait for them: a queue for each request.
class ResponseBoard {
 public:
  using Timeout = std::optional<std::chrono::nanoseconds>;

  void open(const std::vector<RequestId>& ids);
  /// Takes back open() for requests that were not queued after all.
  void discard(const std::vector<RequestId>& ids);
  void post(Response response);
  /// Wakes everybody; from now on waiting throws ExecutorClosedError(reason) where no response is ready, but
  /// for await_any() after a shutdown, which returns none.
  void close(const std::string& reason, ExecutorEnd end);

  /// See Executor::await_responses.
  [[nodiscard]] std::vector<Response> await_any(Timeout timeout);
  [[nodiscard]] std::vector<Response> await(RequestId id, Timeout timeout);
  /// nullopt: the time is over, not every id has a response, and nothing was taken.
  [[nodiscard]] std::optional<std::vector<std::vector<Response>>> await_each(
      const std::vector<RequestId>& ids, Timeout timeout, AtTimeout at_timeout);
  [[nodiscard]] std::size_t num_ready(std::optional<RequestId> id) const;

 private:
  struct Channel {
    std::vector<Response> responses;
    std::condition_variable changed;
    bool is_done = false;  // its last response was taken
  };

  /// nullptr for a request that has ended. Throws RequestError for an id that was never given.
  [[nodiscard]] std::shared_ptr<Channel> find(RequestId id) const;
  void take(RequestId id, Channel& channel, std::vector<Response>& responses);

  mutable std::mutex mutex_;
  std::condition_variable any_changed_;
  std::map<RequestId, std::shared_ptr<Channel>> channels_;
  std::set<RequestId> ready_;
  RequestId last_id_ = 0;  // of those that were ever opened
  std::optional<std::string> closed_;
  ExecutorEnd end_ = ExecutorEnd::kDeath;
};

}  // namespace adaptrt
