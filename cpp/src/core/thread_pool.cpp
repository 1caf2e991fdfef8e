#include "adaptrt/core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace adaptrt {
namespace {

/// Number of spins before a thread blocks: tens of microseconds. This is longer than the gap between two
/// loops of a step, and short compared to a time slice.
constexpr int kSpins = 2000;

/// How often a worker yields its core to other processes between two chunks. Otherwise the system preempts it
/// after a few milliseconds, usually within a chunk, and the loop waits for that chunk.
constexpr std::chrono::milliseconds kOfferInterval{1};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Returns true as soon as `done` returns true; false if it did not for a while.
template <class Done>
bool spin_until(const Done& done) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (done()) return true;
    pause();
  }
  return false;
}

/// Decides when a worker yields its core: kOfferInterval after its last yield or sleep.
class CoreOffers {
 public:
  [[nodiscard]] bool is_due() const { return Clock::now() - last_ >= kOfferInterval; }
  void make_if_due() {
    if (!is_due()) return;
    std::this_thread::yield();
    restart();
  }
  void restart() { last_ = Clock::now(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

/// Value of claim() for no chunk.
constexpr std::int64_t kNone = -1;

}  // namespace

// A loop is published in one word, the ticket: the loop's number in the high half, the number of unclaimed
// chunks in the low half. A thread claims a chunk by decrementing the ticket with a compare-and-swap, which
// fails if another loop has begun. After a claim it may read the loop's fields, because the loop cannot end
// before that chunk.
class ThreadPool::Impl {
 public:
  explicit Impl(int num_threads) {
    try {
      for (int thread = 1; thread < num_threads; ++thread) {
        workers_.emplace_back([this, thread] { work(thread); });
      }
    } catch (...) {
      // The threads that have started use members that are about to be destroyed.
      stop();
      throw;
    }
  }

  ~Impl() { stop(); }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  void measure_busy_time() { busy_times_.assign(workers_.size() + 1, {}); }

  [[nodiscard]] std::vector<double> take_busy_seconds() {
    std::vector<double> seconds;
    for (auto& busy : busy_times_) seconds.push_back(std::exchange(busy.seconds, 0.0));
    return seconds;
  }

  void run(std::int64_t count, std::int64_t grain, const Body& body) {
    // The number of chunks must fit in half a word.
    grain = std::max(grain, count / std::numeric_limits<std::int32_t>::max() + 1);
    const std::int64_t chunks = (count + grain - 1) / grain;
    if (chunks == 1 || workers_.empty()) {
      for (std::int64_t begin = 0; begin < count; begin += grain) {
        const std::int64_t end = std::min(begin + grain, count);
        call(body, {begin, end, end}, 0);
      }
      return;
    }
    body_ = &body;
    count_ = count;
    grain_ = grain;
    chunks_ = chunks;
    pending_.store(chunks, std::memory_order_relaxed);
    ++loop_;
    // Sequentially consistent, like the addition before sleeping: either the sleeper sees the ticket, or this
    // thread sees that it sleeps. An exchange, because qemu lets loads pass the stores of an Arm program.
    ticket_.exchange(loop_ << 32 | static_cast<std::uint64_t>(chunks));
    if (sleepers_.load() > 0) {
      {
        const std::lock_guard lock(mutex_);
      }
      wake_.notify_all();
    }
    // This thread never yields its core, because the others wait for it.
    claim_chunks(0, nullptr);
    const auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(done)) {
      std::unique_lock lock(mutex_);
      caller_waits_.exchange(true);  // see ticket_
      done_.wait(lock, [this] { return pending_.load() == 0; });
      caller_waits_.store(false);
    }
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false, std::memory_order_relaxed);
      const std::lock_guard lock(mutex_);
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  /// Aligned to a cache line: each thread writes its own.
  struct alignas(64) BusyTime {
    double seconds = 0.0;
  };

  void call(const Body& body, const Chunk& chunk, int thread) {
    if (busy_times_.empty()) {
      body(chunk, thread);
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    body(chunk, thread);
    busy_times_[static_cast<std::size_t>(thread)].seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  static std::uint32_t unclaimed(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket); }

  /// Claims and returns a chunk, or returns kNone if none is left.
  std::int64_t claim() {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (unclaimed(ticket) > 0) {
      if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        return chunks_ - static_cast<std::int64_t>(unclaimed(ticket));
      }
    }
    return kNone;
  }

  /// `offers` is nullptr for a thread that never yields its core.
  void claim_chunks(int thread, CoreOffers* offers) {
    const auto claim_first = [&] {
      if (offers != nullptr) offers->make_if_due();
      return claim();
    };
    for (std::int64_t chunk = claim_first(); chunk != kNone;) {
      // A thread that is about to yield its core must not hold a chunk.
      const bool holds_next = body_->looks_ahead() && (offers == nullptr || !offers->is_due());
      const std::int64_t next = holds_next ? claim() : kNone;
      run_chunk(chunk, next, thread);
      chunk = next != kNone ? next : claim_first();
    }
  }

  void run_chunk(std::int64_t chunk, std::int64_t next, int thread) {
    if (!failed_.load(std::memory_order_relaxed)) {
      try {
        const std::int64_t begin = chunk * grain_;
        const std::int64_t behind = next == kNone ? count_ : next * grain_;
        call(*body_, {begin, std::min(begin + grain_, count_), behind}, thread);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
        failed_.store(true, std::memory_order_relaxed);
      }
    }
    if (pending_.fetch_sub(1) == 1 && caller_waits_.load()) {
      {
        const std::lock_guard lock(mutex_);
      }
      done_.notify_one();
    }
  }

  void work(int thread) {
    CoreOffers offers;
    while (true) {
      const auto called = [this] {
        return unclaimed(ticket_.load(std::memory_order_relaxed)) > 0 ||
               stopping_.load(std::memory_order_relaxed);
      };
      if (!spin_until(called)) {
        std::unique_lock lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [this] { return unclaimed(ticket_.load()) > 0 || stopping_.load(); });
        sleepers_.fetch_sub(1);
        offers.restart();
      }
      if (stopping_.load(std::memory_order_relaxed)) return;
      claim_chunks(thread, &offers);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::exception_ptr error_;
  // Written by the caller between loops.
  const Body* body_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t grain_ = 1;
  std::int64_t chunks_ = 0;
  std::uint64_t loop_ = 0;
  /// Indexed by thread; empty if not measured.
  std::vector<BusyTime> busy_times_;
  // On separate cache lines: one is read while the other is written.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<std::int64_t> pending_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_waits_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> stopping_{false};
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>(std::max(1, num_threads))) {}
ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const {
  return impl_->num_threads();
}

void ThreadPool::measure_busy_time() {
  impl_->measure_busy_time();
}

std::vector<double> ThreadPool::take_busy_seconds() {
  return impl_->take_busy_seconds();
}

void ThreadPool::parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
  if (count <= 0) return;
  impl_->run(count, std::max<std::int64_t>(1, grain), body);
}

}  // namespace adaptrt
