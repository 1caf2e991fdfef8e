#pragma once

#include <cstdint>
#include <string>

namespace adaptrt::testing {

// Programs that link allocations.cpp get an operator new that counts allocations.

/// Number of allocations of the calling thread so far.
[[nodiscard]] std::int64_t allocations_of_this_thread();

/// Counts the allocations of all threads until it is stopped, and records the call stack of the first one.
/// Only one object may exist at a time.
class AllocationWatch {
 public:
  AllocationWatch();
  ~AllocationWatch();
  AllocationWatch(const AllocationWatch&) = delete;
  AllocationWatch& operator=(const AllocationWatch&) = delete;

  /// Stops counting and returns the count.
  std::int64_t stop();
  /// Returns the call stack of the first allocation, innermost first, one line per call. Runs addr2line to
  /// find the names. Must be called after stop().
  [[nodiscard]] std::string first_calls() const;
};

/// While this object exists, the next `count` allocations in threads other than its creator's throw
/// std::bad_alloc. Only one object may exist at a time.
class FailingAllocations {
 public:
  explicit FailingAllocations(std::int64_t count);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;
};

}  // namespace adaptrt::testing
