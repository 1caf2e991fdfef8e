#include "adaptrt/core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace adaptrt {

class ThreadPool::Impl {
 public:
  explicit Impl(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) {
      workers_.emplace_back([this, thread] { work(thread); });
    }
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  void run(std::int64_t count, std::int64_t grain, const Body& body) {
    {
      const std::lock_guard lock(mutex_);
      body_ = &body;
      count_ = count;
      grain_ = grain;
      next_.store(0, std::memory_order_relaxed);
      active_ = static_cast<int>(workers_.size());
      ++loop_;
    }
    wake_.notify_all();
    claim_chunks(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return active_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void claim_chunks(int thread) {
    try {
      while (true) {
        const std::int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
        if (begin >= count_) return;
        (*body_)(begin, std::min(begin + grain_, count_), thread);
      }
    } catch (...) {
      next_.store(count_, std::memory_order_relaxed);
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void work(int thread) {
    std::uint64_t seen = 0;
    while (true) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || loop_ != seen; });
        if (stopping_) return;
        seen = loop_;
      }
      claim_chunks(thread);
      {
        const std::lock_guard lock(mutex_);
        if (--active_ == 0) done_.notify_one();
      }
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const Body* body_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t grain_ = 1;
  std::atomic<std::int64_t> next_{0};
  int active_ = 0;
  std::uint64_t loop_ = 0;
  std::exception_ptr error_;
  bool stopping_ = false;
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>(std::max(1, num_threads))) {}
ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return impl_->num_threads(); }

void ThreadPool::parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
  if (count <= 0) return;
  impl_->run(count, std::max<std::int64_t>(1, grain), body);
}

}  // namespace adaptrt
