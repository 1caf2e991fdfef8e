#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// Ranges of pinned host memory. Pinning takes about as long as a copy of the same size to the device, so
/// memory is pinned in slabs, which are kept and used again. Thread-safe. It must be owned by a shared
/// pointer; ranges keep it alive.
class PinnedSlabs : public std::enable_shared_from_this<PinnedSlabs> {
 public:
  /// Slabs are as large as all before them together, from the first to the second size. So a cache of few
  /// adapters pins little.
  static constexpr std::size_t kMinSlabBytes = std::size_t{8} << 20;
  static constexpr std::size_t kMaxSlabBytes = std::size_t{256} << 20;
  /// Alignment of each range.
  static constexpr std::size_t kAlignment = 256;

  explicit PinnedSlabs(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  /// Returns a range of `bytes`, above 0. Returns nullptr if no free range is large enough and another slab
  /// would exceed `max_bytes` in total, or cannot be pinned. Slabs without ranges are freed to make room for
  /// it.
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes, std::size_t max_bytes);
  /// Bytes of all slabs.
  [[nodiscard]] std::size_t bytes() const;

 private:
  using FreeRanges = std::map<std::size_t, std::size_t>;  // bytes by offset
  /// A range in use keeps its node, so that giving it back allocates nothing.
  using FreeRange = FreeRanges::node_type;
  struct Slab {
    Allocation memory;
    FreeRanges free;

    [[nodiscard]] bool is_unused() const { return !free.empty() && free.begin()->second == memory.bytes(); }
  };
  using Slabs = std::list<Slab>;

  // Call these with slabs_mutex_ held.
  [[nodiscard]] std::shared_ptr<std::byte> take_free(std::size_t bytes);
  [[nodiscard]] std::shared_ptr<std::byte> take(Slabs::iterator slab, std::size_t offset, std::size_t bytes);
  /// Takes slabs without ranges out until `bytes` more fit.
  [[nodiscard]] Slabs take_unused(std::size_t bytes, std::size_t max_bytes);

  [[nodiscard]] std::size_t size_of_next_slab(std::size_t bytes, std::size_t max_bytes) const;
  [[nodiscard]] Allocation pin(std::size_t slab_bytes, std::size_t bytes);
  void give_back(Slabs::iterator slab, FreeRange range) noexcept;

  const std::shared_ptr<Device> device_;
  /// Held while a slab is pinned, so that threads that need memory at the same time share one.
  std::mutex growth_mutex_;
  mutable std::mutex slabs_mutex_;
  Slabs slabs_;
  std::size_t total_bytes_ = 0;
};

}  // namespace adaptrt
