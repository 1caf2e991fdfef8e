#include "adaptrt/gpu/pinned_slabs.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

std::shared_ptr<std::byte> PinnedSlabs::allocate(std::size_t bytes, std::size_t max_bytes) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  {
    const std::lock_guard lock(slabs_mutex_);
    if (auto range = take_free(bytes)) return range;
  }
  const std::lock_guard growth(growth_mutex_);
  Slabs unused;  // freed without the lock: the device may take long
  std::size_t slab_bytes = 0;
  {
    const std::lock_guard lock(slabs_mutex_);
    if (auto range = take_free(bytes)) return range;  // of a slab that came meanwhile
    unused = take_unused(bytes, max_bytes);
    slab_bytes = size_of_next_slab(bytes, max_bytes);
  }
  unused.clear();
  if (slab_bytes == 0) return nullptr;
  Slabs added(1);
  added.front().memory = pin(slab_bytes, bytes);
  const std::size_t pinned = added.front().memory.bytes();
  if (pinned == 0) return nullptr;
  added.front().free[0] = pinned;
  const std::lock_guard lock(slabs_mutex_);
  slabs_.splice(slabs_.end(), added);
  total_bytes_ += pinned;
  return take(std::prev(slabs_.end()), 0, bytes);
}

std::size_t PinnedSlabs::bytes() const {
  const std::lock_guard lock(slabs_mutex_);
  return total_bytes_;
}

std::shared_ptr<std::byte> PinnedSlabs::take_free(std::size_t bytes) {
  for (auto slab = slabs_.begin(); slab != slabs_.end(); ++slab) {
    for (const auto& [offset, free] : slab->free) {
      if (free >= bytes) return take(slab, offset, bytes);
    }
  }
  return nullptr;
}

std::shared_ptr<std::byte> PinnedSlabs::take(Slabs::iterator slab, std::size_t offset, std::size_t bytes) {
  const std::size_t rest = slab->free.at(offset) - bytes;
  if (rest > 0) slab->free[offset + bytes] = rest;
  FreeRange range = slab->free.extract(offset);
  range.mapped() = bytes;
  return {slab->memory.data() + offset,
          [slabs = shared_from_this(), slab, range = std::move(range)](std::byte* /*memory*/) mutable {
            slabs->give_back(slab, std::move(range));
          }};
}

PinnedSlabs::Slabs PinnedSlabs::take_unused(std::size_t bytes, std::size_t max_bytes) {
  Slabs unused;
  for (auto next = slabs_.begin(); next != slabs_.end() && total_bytes_ + bytes > max_bytes;) {
    const auto slab = next++;
    if (!slab->is_unused()) continue;
    total_bytes_ -= slab->memory.bytes();
    unused.splice(unused.end(), slabs_, slab);
  }
  return unused;
}

/// Slabs hold a whole number of ranges like this one: most adapters of a server have the same size.
std::size_t PinnedSlabs::size_of_next_slab(std::size_t bytes, std::size_t max_bytes) const {
  if (total_bytes_ + bytes > max_bytes) return 0;
  const std::size_t wanted = std::clamp(total_bytes_, kMinSlabBytes, kMaxSlabBytes);
  return std::max<std::size_t>(std::min(wanted, max_bytes - total_bytes_) / bytes, 1) * bytes;
}

/// Returns no memory if not even `bytes` can be pinned.
Allocation PinnedSlabs::pin(std::size_t slab_bytes, std::size_t bytes) {
  try {
    return device_->allocate_pinned(slab_bytes);
  } catch (const ConfigError&) {
    if (slab_bytes == bytes) return {};
  }
  return pin(bytes, bytes);
}

void PinnedSlabs::give_back(Slabs::iterator slab, FreeRange range) noexcept {
  const std::lock_guard lock(slabs_mutex_);
  auto after = slab->free.upper_bound(range.key());
  if (after != slab->free.end() && after->first == range.key() + range.mapped()) {
    range.mapped() += after->second;
    after = slab->free.erase(after);
  }
  if (after != slab->free.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == range.key()) {
      before->second += range.mapped();
      return;
    }
  }
  slab->free.insert(std::move(range));
}

}  // namespace adaptrt
