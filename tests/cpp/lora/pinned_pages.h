#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "adaptrt/lora/host_pages.h"

namespace adaptrt::testing {

/// Pages of a device with pinned memory, in host memory. Copies are made when they are awaited, as late as
/// possible.
class PinnedPages final : public AdapterPages {
 public:
  /// Calls of the cache; it outlives the pages.
  struct Log {
    std::function<void()> before_copies = [] {};  ///< called in begin_copies(); may throw
    std::function<void()> in_wait = [] {};        ///< called in wait(), before the copies; may wait or throw
    std::size_t most_pinned = std::size_t{1} << 30;  ///< allocations above this size give nothing
    std::mutex mutex;
    std::vector<Copy> copies;          ///< of the newest begin_copies()
    std::vector<std::size_t> allowed;  ///< max_bytes of each allocate_pinned()
    std::size_t pinned = 0;            ///< allocated now
    int staged = 0;                    ///< calls of load()
  };

  PinnedPages(std::size_t page_bytes, std::int64_t num_pages, Log& log)
      : pages_(page_bytes, num_pages), log_(log) {}

  [[nodiscard]] std::size_t page_bytes() const override { return pages_.page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return pages_.num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return pages_.address(page); }
  void load(std::span<const std::int64_t> pages, const Write& write) override {
    ++log_.staged;
    pages_.load(pages, write);
  }
  [[nodiscard]] std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes,
                                                           std::size_t max_bytes) override {
    const std::lock_guard lock(log_.mutex);
    log_.allowed.push_back(max_bytes);
    if (bytes > log_.most_pinned) return nullptr;
    log_.pinned += bytes;
    auto* memory = new std::byte[bytes];
    std::memset(memory, 0xA7, bytes);
    return {memory, [&log = log_, bytes](std::byte* freed) {
              std::memset(freed, 0xDD, bytes);
              const std::lock_guard freeing(log.mutex);
              log.pinned -= bytes;
              delete[] freed;
            }};
  }
  [[nodiscard]] std::size_t pinned_bytes() const override {
    const std::lock_guard lock(log_.mutex);
    return log_.pinned;
  }
  [[nodiscard]] std::unique_ptr<Copies> begin_copies(std::uint64_t /*load_id*/,
                                                     std::span<const Copy> copies) override {
    log_.before_copies();
    const std::lock_guard lock(log_.mutex);
    log_.copies.assign(copies.begin(), copies.end());
    return std::make_unique<LateCopies>(*this, copies);
  }

 private:
  class LateCopies final : public Copies {
   public:
    LateCopies(PinnedPages& pages, std::span<const Copy> copies)
        : pages_(pages), copies_(copies.begin(), copies.end()) {}
    void wait() override {
      pages_.log_.in_wait();
      for (const Copy& copy : copies_) {
        std::memcpy(pages_.address(copy.page) + copy.offset, copy.from.data(), copy.from.size());
      }
    }

   private:
    PinnedPages& pages_;
    std::vector<Copy> copies_;
  };

  HostPages pages_;
  Log& log_;
};

}  // namespace adaptrt::testing
