#pragma once

#include <cstddef>
#include <utility>

namespace adaptrt {

/// A large zero-filled array, on huge pages if the system provides them. Memory is allocated page by page at
/// the first access. For KV pools, arenas and caches, whose speed is limited by memory bandwidth.
class HugeArray {
 public:
  HugeArray() = default;
  /// Throws std::bad_alloc if the memory cannot be allocated.
  explicit HugeArray(std::size_t bytes);
  ~HugeArray();
  HugeArray(HugeArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HugeArray& operator=(HugeArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;

  /// Gives the system pages that lie wholly in this range back. The range must not be read afterwards.
  void discard(std::size_t offset, std::size_t bytes) noexcept;
  /// Reduces the array to its first `bytes` bytes, rounded up to a system page.
  void truncate(std::size_t bytes) noexcept;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace adaptrt
