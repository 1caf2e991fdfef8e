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

  /// Calls `body` on chunks of at most `grain` until [0, count) is covered, thread in [0, num_threads()), and
  /// returns when all have returned. A single chunk runs in the calling thread at once. The first exception
  /// that a body throws is rethrown here; chunks that were not begun by then are left out.
  ///
  /// For a body that looks ahead a thread claims a chunk before it begins the one before, so that its memory
  /// can be fetched meanwhile; the loop waits for up to two chunks of a thread at its end.
  void parallel_for(std::int64_t count, std::int64_t grain, const Body& body);

  /// Starts to measure the time that each thread spends in bodies. Call it only between loops.
  void measure_busy_time();
  /// [num_threads()], seconds since measure_busy_time() or the last call of this; to be called between loops
  /// as well. Empty when it is not measured.
  [[nodiscard]] std::vector<double> take_busy_seconds();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace adaptrt
