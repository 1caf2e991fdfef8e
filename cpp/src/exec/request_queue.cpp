#include "request_queue.h"

#include <iterator>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

void RequestQueue::reserve(std::size_t count) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw ExecutorClosedError(*closed_);
  if (max_queue_size_ && num_queued_ + count > static_cast<std::size_t>(*max_queue_size_)) {
    throw QueueFullError("the queue holds " + std::to_string(num_queued_) +
                         " requests and max_queue_size is " + std::to_string(*max_queue_size_) +
                         "; there is no room for " + std::to_string(count) + " more");
  }
  num_queued_ += count;
}

void RequestQueue::release(std::size_t count) {
  const std::lock_guard lock(mutex_);
  num_queued_ -= count;
}

void RequestQueue::submit(std::vector<std::unique_ptr<ActiveRequest>>& requests) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ExecutorClosedError(*closed_);
    work_.arrivals.insert(work_.arrivals.end(), std::make_move_iterator(requests.begin()),
                          std::make_move_iterator(requests.end()));
  }
  changed_.notify_one();
}

void RequestQueue::cancel(RequestId id) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ExecutorClosedError(*closed_);
    work_.cancelled.push_back(id);
  }
  changed_.notify_one();
}

void RequestQueue::wake() {
  {
    const std::lock_guard lock(mutex_);
    work_.woken = true;
  }
  changed_.notify_one();
}

void RequestQueue::reset_prefix_cache() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ExecutorClosedError(*closed_);
    work_.resets_prefix_cache = true;
  }
  changed_.notify_one();
}

void RequestQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    work_.stop = true;
  }
  changed_.notify_one();
}

void RequestQueue::close(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!closed_) closed_ = reason;
}

void RequestQueue::throw_if_closed() const {
  const std::lock_guard lock(mutex_);
  if (closed_) throw ExecutorClosedError(*closed_);
}

bool RequestQueue::is_open() const {
  const std::lock_guard lock(mutex_);
  return !closed_;
}

bool RequestQueue::has_room() const {
  const std::lock_guard lock(mutex_);
  return !closed_ && (!max_queue_size_ || num_queued_ < static_cast<std::size_t>(*max_queue_size_));
}

std::size_t RequestQueue::num_queued() const {
  const std::lock_guard lock(mutex_);
  return num_queued_;
}

RequestQueue::Work RequestQueue::take(bool wait, std::optional<Clock::time_point> until) {
  const auto has_work = [&] {
    return work_.stop || work_.woken || work_.resets_prefix_cache || !work_.arrivals.empty() ||
           !work_.cancelled.empty();
  };
  std::unique_lock lock(mutex_);
  if (wait && until) {
    changed_.wait_until(lock, *until, has_work);
  } else if (wait) {
    changed_.wait(lock, has_work);
  }
  return std::exchange(work_, Work{});
}

}  // namespace adaptrt
