#pragma once

#include <cstdint>
#include <string>

namespace adaptrt::testing {

// A program that links this has operator new count.

/// Allocations of the calling thread so far.
[[nodiscard]] std::int64_t allocations_of_this_thread();

/// Counts the allocations of all threads until it is stopped, and keeps who made the first. One at a time.
class AllocationWatch {
 public:
  AllocationWatch();
  ~AllocationWatch();
  AllocationWatch(const AllocationWatch&) = delete;
  AllocationWatch& operator=(const AllocationWatch&) = delete;

  /// Returns the count.
  std::int64_t stop();
  /// After stop(): the calls that led to the first allocation, innermost first, a line each; asks addr2line
  /// for their names.
  [[nodiscard]] std::string first_calls() const;
};

/// While this lives, the next `count` allocations of threads other than the one that made it throw
/// std::bad_alloc. One at a time.
class FailingAllocations {
 public:
  explicit FailingAllocations(std::int64_t count);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;
};

}  // namespace adaptrt::testing
