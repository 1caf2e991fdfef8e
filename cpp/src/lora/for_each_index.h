#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace adaptrt {

/// Calls body(index, thread) for each index below `count`, in this thread and up to num_threads - 1 new ones.
/// Returns after all calls. Rethrows the first exception of a body; indices that were not begun are skipped.
template <class Body>
void for_each_index(std::size_t count, std::size_t num_threads, const Body& body) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&](std::size_t thread) {
    try {
      for (std::size_t index = next++; index < count; index = next++) body(index, thread);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (std::size_t thread = 1; thread < std::min(num_threads, count); ++thread) {
      helpers.emplace_back(work, thread);
    }
    work(0);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace adaptrt
