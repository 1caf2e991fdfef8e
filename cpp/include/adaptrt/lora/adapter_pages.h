#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace adaptrt {

class HostAdapter;

/// Memory of the LoRA cache's device level: pages of equal size, numbered from 0. Several threads may call
/// load() and begin_copies() at the same time for different pages; everything else is constant.
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

  /// Calls `write` for each of `pages`, in order, with page_bytes() bytes of host memory. `write` returns the
  /// number of bytes that it wrote. Returns after the written data is in the pages. Rethrows what `write`
  /// throws; throws StepError if the device fails.
  using Write = std::function<std::size_t(std::size_t index, std::byte* host_page)>;
  virtual void load(std::span<const std::int64_t> pages, const Write& write) = 0;

  /// Returns pinned memory of `bytes`, from which begin_copies() can copy. Returns nullptr if the device has
  /// no memory of its own, if the system pins no more memory, or if there would then be more than `max_bytes`
  /// of it. Any thread may call it, and drop the result.
  [[nodiscard]] virtual std::shared_ptr<std::byte> allocate_pinned(std::size_t /*bytes*/,
                                                                   std::size_t /*max_bytes*/) {
    return nullptr;
  }
  /// Number of bytes that are pinned for allocate_pinned().
  [[nodiscard]] virtual std::size_t pinned_bytes() const { return 0; }

  /// One range of an adapter that is copied to a page.
  struct Copy {
    std::int64_t page = 0;
    std::size_t offset = 0;
    std::span<const std::byte> from;  ///< in memory of allocate_pinned()
    /// load_position() of the first site in the range.
    std::int32_t position = 0;
  };
  /// Copies that run; its destructor waits for them.
  class Copies {
   public:
    virtual ~Copies() = default;
    /// Waits until the data is in the pages. Throws StepError if the device fails.
    virtual void wait() = 0;
  };
  /// Enqueues copies, whose positions ascend. The source must not change before they are done. From then on,
  /// steps may read the adapter of this DeviceAdapter::load_id: they wait for the copies, and fail if the
  /// copies do. Throws StepError if the device fails; no copy runs then.
  [[nodiscard]] virtual std::unique_ptr<Copies> begin_copies(std::uint64_t load_id,
                                                             std::span<const Copy> copies);

  /// Called after load() and before any step reads the pages, with the adapter in `pages` and its
  /// DeviceAdapter::load_id. For engines whose other ranks have pages too (shares_adapters()).
  virtual void share(const std::shared_ptr<const HostAdapter>& /*adapter*/,
                     std::span<const std::int64_t> /*pages*/, std::uint64_t /*load_id*/) {}
};

}  // namespace adaptrt
