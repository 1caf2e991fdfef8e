#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// Copies of host memory that is not pinned, such as a mapped file, to a device. They go through pinned
/// staging memory in two halves: one is filled while the other is copied.
class StagedCopies {
 public:
  /// Size of a half: large enough that starting a copy takes no noticeable time.
  static constexpr std::size_t kHalfBytes = std::size_t{32} << 20;

  /// Throws ConfigError if the device cannot allocate the staging memory.
  StagedCopies(Device& device, Stream& stream, std::size_t half_bytes = kHalfBytes);
  StagedCopies(const StagedCopies&) = delete;
  StagedCopies& operator=(const StagedCopies&) = delete;
  ~StagedCopies() = default;

  /// Copies `from` to the device address `to`. `from` may change afterwards; the copy is complete after
  /// finish(). Throws as Stream.
  void copy(std::byte* to, std::span<const std::byte> from);
  /// Waits until all copies are complete, and frees the staging memory. No copies may follow.
  void finish();

 private:
  struct Half {
    Allocation memory;
    std::unique_ptr<Event> copied;
  };

  Stream& stream_;
  std::array<Half, 2> halves_;
  std::size_t next_half_ = 0;
};

}  // namespace adaptrt
