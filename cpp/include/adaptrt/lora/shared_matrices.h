#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>

#include "adaptrt/core/huge_array.h"

namespace adaptrt {

/// Matrices and vectors below this size are not shared: finding them would cost more than they take.
inline constexpr std::size_t kMinSharedBytes = 4096;

/// Memory of one packed adapter. Its matrices may live longer than the adapter.
struct PackedMemory {
  explicit PackedMemory(HugeArray memory) : array(std::move(memory)) {}
  /// `memory` is pinned; see AdapterPages::allocate_pinned.
  explicit PackedMemory(std::shared_ptr<std::byte> memory) : pinned(std::move(memory)) {}

  [[nodiscard]] std::byte* data() const { return pinned ? pinned.get() : array.data(); }

  /// Empty if the memory is pinned.
  HugeArray array;
  const std::shared_ptr<std::byte> pinned;
  /// True if an adapter with other memory has used a matrix in it.
  std::atomic<bool> is_lent = false;
};

class SharedMatrices;

/// A packed matrix or vector that several adapters may refer to. The memory is given back with the last of
/// them.
class SharedMatrix {
 public:
  SharedMatrix(std::shared_ptr<SharedMatrices> matrices, std::shared_ptr<PackedMemory> memory,
               std::span<const std::byte> bytes, std::uint64_t checksum);
  ~SharedMatrix();
  SharedMatrix(const SharedMatrix&) = delete;
  SharedMatrix& operator=(const SharedMatrix&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }
  /// Bytes of memory that it takes.
  [[nodiscard]] std::size_t memory_bytes() const;

  /// Number of the cache's adapters that refer to it. Changes only under the cache's lock.
  std::int64_t users = 0;

 private:
  friend class SharedMatrices;
  std::shared_ptr<SharedMatrices> matrices_;
  std::shared_ptr<PackedMemory> memory_;
  std::span<const std::byte> bytes_;
  std::uint64_t checksum_;
};

/// Finds packed matrices by their content. Thread-safe. It must be owned by a shared pointer.
class SharedMatrices : public std::enable_shared_from_this<SharedMatrices> {
 public:
  /// Returns the matrix with the same bytes, for an adapter with `memory`. If there is none, the bytes, which
  /// lie in `memory` and no longer change, become one.
  [[nodiscard]] std::shared_ptr<SharedMatrix> find_or_add(const std::shared_ptr<PackedMemory>& memory,
                                                          std::span<const std::byte> bytes);
  /// Number of matrices that exist.
  [[nodiscard]] std::size_t count() const;

 private:
  friend class SharedMatrix;
  void forget(const SharedMatrix& matrix) noexcept;

  mutable std::mutex mutex_;
  std::unordered_multimap<std::uint64_t, std::weak_ptr<SharedMatrix>> by_checksum_;
};

}  // namespace adaptrt
