#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace adaptrt {

/// Worker threads that share out the chunks of one loop at a time.
///
/// Chunks are claimed one by one, so a worker that another process holds up delays its own chunk and no
/// other, and one that comes too late for a loop is not waited for. Workers spin briefly for the next loop,
/// then block; between two chunks they let another process have their core from time to time, so that it is
/// seldom taken away within one. The calling thread works too: a pool of one has no other thread. Calls from
/// several threads at once are not allowed.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const;

  /// A callable that outlives the loop, by reference: body(begin, end, thread).
  class Body {
   public:
    template <class Callable>
      requires(!std::is_same_v<Callable, Body>)
    Body(const Callable& callable)  // NOLINT(google-explicit-constructor): made at the call of parallel_for
        : callable_(&callable),
          call_([](const void* object, std::int64_t begin, std::int64_t end, int thread) {
            (*static_cast<const Callable*>(object))(begin, end, thread);
          }) {}
    void operator()(std::int64_t begin, std::int64_t end, int thread) const {
      call_(callable_, begin, end, thread);
    }

   private:
    const void* callable_;
    void (*call_)(const void*, std::int64_t, std::int64_t, int);
  };

  /// Calls body(begin, end, thread) on chunks of at most `grain` until [0, count) is covered, thread in
  /// [0, num_threads()), and returns when all have returned. A single chunk runs in the calling thread at
  /// once. The first exception that a body throws is rethrown here; chunks that were not claimed by then are
  /// left out.
  void parallel_for(std::int64_t count, std::int64_t grain, const Body& body);

  /// From now on adds up the time that each thread spends in bodies. To be called between loops.
  void measure_busy_time();
  /// [num_threads()], seconds since measure_busy_time() or the last call of this; to be called between loops
  /// as well. Empty when it is not measured.
  [[nodiscard]] std::vector<double> take_busy_seconds();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace adaptrt
