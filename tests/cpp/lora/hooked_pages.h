#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <utility>

#include "adaptrt/lora/host_pages.h"

namespace adaptrt::testing {

/// Host pages that call a test's hook before each load; it may wait or throw.
class HookedPages final : public AdapterPages {
 public:
  using Hook = std::function<void()>;
  HookedPages(std::size_t page_bytes, std::int64_t num_pages, Hook before_load)
      : pages_(page_bytes, num_pages), before_load_(std::move(before_load)) {}

  [[nodiscard]] std::size_t page_bytes() const override { return pages_.page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return pages_.num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return pages_.address(page); }
  void load(std::span<const std::int64_t> pages, const Write& write) override {
    before_load_();
    pages_.load(pages, write);
  }

 private:
  HostPages pages_;
  Hook before_load_;
};

/// A door: threads pass while it is open and wait while it is shut.
class Door {
 public:
  void shut() { set_open(false); }
  void open() { set_open(true); }
  void pass() {
    std::unique_lock lock(mutex_);
    ++num_waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return is_open_; });
    --num_waiting_;
  }
  /// Returns when this many threads wait.
  void await_waiting(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_waiting_ >= count; });
  }

 private:
  void set_open(bool is_open) {
    const std::lock_guard lock(mutex_);
    is_open_ = is_open;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = true;
  int num_waiting_ = 0;
};

/// Counts calls, and waits for a number of them.
class Counter {
 public:
  void add() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void await(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
  }
  [[nodiscard]] int count() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

}  // namespace adaptrt::testing
