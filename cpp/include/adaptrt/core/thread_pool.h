#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace adaptrt {

/// Worker threads that share the chunks of a parallel loop, one loop at a time.
///
/// Threads claim chunks one by one. So a worker that another process delays holds up only its own chunk, and
/// a loop does not wait for late workers. Workers spin briefly for the next loop and then block. Between
/// chunks they sometimes yield their core to other processes, so that the system seldom preempts them within
/// a chunk. The calling thread works too; a pool of one thread has no workers. Only one thread at a time may
/// call.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const;

  /// A part [begin, end) of a loop. `next` is the beginning of the same thread's next chunk, if the body
  /// looks ahead and such a chunk exists; otherwise it is the end of the loop.
  struct Chunk {
    std::int64_t begin;
    std::int64_t end;
    std::int64_t next;
  };

  /// A reference to a callable that outlives the loop: body(begin, end, thread), or body(chunk, thread) if it
  /// looks ahead.
  class Body {
   public:
    template <class Callable>
      requires(!std::is_same_v<Callable, Body>)
    Body(const Callable& callable)  // NOLINT(google-explicit-constructor): made at the call of parallel_for
        : callable_(&callable), call_(&call<Callable>), looks_ahead_(kTakesChunk<Callable>) {}
    void operator()(const Chunk& chunk, int thread) const { call_(callable_, chunk, thread); }

    [[nodiscard]] bool looks_ahead() const { return looks_ahead_; }

   private:
    template <class Callable>
    static constexpr bool kTakesChunk = std::is_invocable_v<const Callable&, const Chunk&, int>;

    template <class Callable>
    static void call(const void* object, const Chunk& chunk, int thread) {
      const auto& callable = *static_cast<const Callable*>(object);
      if constexpr (kTakesChunk<Callable>) {
        callable(chunk, thread);
      } else {
        callable(chunk.begin, chunk.end, thread);
      }
    }

    const void* callable_;
    void (*call_)(const void*, const Chunk&, int);
    bool looks_ahead_;
  };

  /// Calls `body` on chunks of at most `grain` until [0, count) is covered, with `thread` in [0,
  /// num_threads()), and returns after all calls have returned. A single chunk runs at once in the calling
  /// thread. The first exception of a body is rethrown here; chunks that have not begun by then are skipped.
  ///
  /// If the body looks ahead, a thread claims the next chunk before it starts the current one, so that the
  /// next chunk's memory can be prefetched. At the end of the loop, this can add the time of one more chunk.
  void parallel_for(std::int64_t count, std::int64_t grain, const Body& body);

  /// Starts to measure the time that each thread spends in bodies. Call it only between loops.
  void measure_busy_time();
  /// Returns float64 [num_threads()], seconds since measure_busy_time() or the last call. Call it only
  /// between loops. Empty if the time is not measured.
  [[nodiscard]] std::vector<double> take_busy_seconds();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace adaptrt
