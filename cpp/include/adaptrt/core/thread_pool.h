#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace adaptrt {

/// Worker threads that share out the chunks of one loop at a time.
///
/// Chunks are claimed one by one, so a worker that another process holds up delays its own chunk and no other; workers
/// spin briefly for the next loop, then block. The calling thread works too: a pool of one has no other thread.
/// Calls from several threads at once are not allowed.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const;

  /// Calls body(begin, end, thread) on chunks of at most `grain` until [0, count) is covered, thread in
  /// [0, num_threads()), and returns when all have returned. The first exception that a body throws is rethrown here.
  using Body = std::function<void(std::int64_t begin, std::int64_t end, int thread)>;
  void parallel_for(std::int64_t count, std::int64_t grain, const Body& body);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace adaptrt
