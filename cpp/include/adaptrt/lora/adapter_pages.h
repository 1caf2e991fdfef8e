#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace adaptrt {

class HostAdapter;

/// Memory of the LoRA cache's device level: pages of equal size, numbered from 0. Several threads may call
/// load() at the same time for different pages; everything else is constant.
class AdapterPages {
 public:
  virtual ~AdapterPages() = default;
  [[nodiscard]] virtual std::size_t page_bytes() const = 0;
  [[nodiscard]] virtual std::int64_t num_pages() const = 0;
  /// Address of a page for the kernels; only load() writes there. Host code must not access it if the device
  /// has memory of its own.
  [[nodiscard]] virtual std::byte* address(std::int64_t page) const = 0;
  /// True if steps can read adapters anywhere in host memory. A cache then leaves packed adapters where its
  /// host level keeps them, never calls load(), and only counts pages.
  [[nodiscard]] virtual bool is_host_memory() const { return false; }
  /// True if share() needs adapters as sent.
  [[nodiscard]] virtual bool shares_adapters() const { return false; }

  /// Calls `write` once with page_bytes() bytes of host memory for each of `pages`, and returns after the
  /// written data is in the pages. Rethrows what `write` throws; throws StepError if the device fails.
  using Write = std::function<void(std::span<std::byte* const> host_pages)>;
  virtual void load(std::span<const std::int64_t> pages, const Write& write) = 0;

  /// Called after load() and before any step reads the pages, with the adapter in `pages` and its
  /// DeviceAdapter::load_id. For engines whose other ranks have pages too (shares_adapters()).
  virtual void share(const std::shared_ptr<const HostAdapter>& /*adapter*/,
                     std::span<const std::int64_t> /*pages*/, std::uint64_t /*load_id*/) {}
};

}  // namespace adaptrt
