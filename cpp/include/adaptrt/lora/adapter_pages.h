#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace adaptrt {

class HostAdapter;

/// The memory of the LoRA cache's device level: pages of one size, numbered from 0. load() is called from
/// several threads at once, for different pages; the rest never changes.
class AdapterPages {
 public:
  virtual ~AdapterPages() = default;
  [[nodiscard]] virtual std::size_t page_bytes() const = 0;
  [[nodiscard]] virtual std::int64_t num_pages() const = 0;
  /// Where the kernels find a page; only load() writes there. On a device with memory of its own, host code
  /// must not touch it.
  [[nodiscard]] virtual std::byte* address(std::int64_t page) const = 0;

  /// Calls `write` once with host memory of page_bytes() for each of `pages`, and returns when what it wrote
  /// is in the pages. Throws what `write` throws, and StepError when the device fails.
  using Write = std::function<void(std::span<std::byte* const> host_pages)>;
  virtual void load(std::span<const std::int64_t> pages, const Write& write) = 0;

  /// Called after load() with what was packed into `pages`, as DeviceAdapter::load_id, before any step reads
  /// it: for engines whose other ranks have pages as well.
  virtual void share(const std::shared_ptr<const HostAdapter>& /*adapter*/,
                     std::span<const std::int64_t> /*pages*/, std::uint64_t /*load_id*/) {}
};

}  // namespace adaptrt
