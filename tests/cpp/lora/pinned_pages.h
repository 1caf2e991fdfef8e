#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
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
    std::condition_variable has_ended;
    std::map<std::uint64_t, bool> ended;  ///< loads whose copies were awaited: true if they were made
    int staged = 0;                       ///< calls of load()
  };

  /// Waits for the copies of a load, as a step does. Returns false if they failed.
  static bool await(Log& log, std::uint64_t load_id) {
    std::unique_lock lock(log.mutex);
    log.has_ended.wait(lock, [&] { return log.ended.contains(load_id); });
    return log.ended[load_id];
  }

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
  [[nodiscard]] std::unique_ptr<Copies> begin_copies(std::uint64_t load_id,
                                                     std::span<const Copy> copies) override {
    log_.before_copies();
    const std::lock_guard lock(log_.mutex);
    log_.copies.assign(copies.begin(), copies.end());
    return std::make_unique<LateCopies>(*this, load_id, copies);
  }

 private:
  class LateCopies final : public Copies {
   public:
    LateCopies(PinnedPages& pages, std::uint64_t load_id, std::span<const Copy> copies)
        : pages_(pages), load_id_(load_id), copies_(copies.begin(), copies.end()) {}
    ~LateCopies() override {
      const std::lock_guard lock(pages_.log_.mutex);
      pages_.log_.ended[load_id_] = are_made_;
      pages_.log_.has_ended.notify_all();
    }
    LateCopies(const LateCopies&) = delete;
    LateCopies& operator=(const LateCopies&) = delete;
    void wait() override {
      pages_.log_.in_wait();
      for (const Copy& copy : copies_) {
        std::memcpy(pages_.address(copy.page) + copy.offset, copy.from.data(), copy.from.size());
      }
      are_made_ = true;
    }

   private:
    PinnedPages& pages_;
    std::uint64_t load_id_;
    std::vector<Copy> copies_;
    bool are_made_ = false;
  };

  HostPages pages_;
  Log& log_;
};

}  // namespace adaptrt::testing
