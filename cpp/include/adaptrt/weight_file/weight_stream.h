#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/weight_file/weight_file.h"

namespace adaptrt {

/// Weights that are used one unit after the other in an order that is known. A thread reads them ahead of
/// their use, into a ring that has room for some of them.
class WeightStream {
 public:
  /// Keeps a unit in the ring for as long as it lives.
  class Held {
   public:
    explicit Held(WeightStream* stream) : stream_(stream) {}
    Held(Held&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
    Held& operator=(Held&&) = delete;
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
      if (stream_ != nullptr) stream_->release();
    }

   private:
    WeightStream* stream_;
  };

  /// Units are used in the order of their numbers; behind the last one comes `first_again`. `ring_bytes`: at
  /// least those of every unit's pages. Throws std::bad_alloc.
  WeightStream(std::shared_ptr<WeightFile> file, std::vector<FilePages> units, std::size_t ring_bytes,
               std::size_t first_again);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  [[nodiscard]] const HugeArray& ring() const { return ring_; }
  /// Where a byte of the file that belongs to a unit lies while the unit is held.
  [[nodiscard]] const std::byte* address_of(std::size_t unit, std::size_t offset) const;

  /// Waits until a unit is in the ring; one at a time, of one thread. Another than the next one may be asked
  /// for: what was read ahead is given up then. Throws StepError when it cannot be read; it is tried again
  /// when it is asked for again.
  [[nodiscard]] Held hold(std::size_t unit);

 private:
  struct Unit {
    FilePages pages;
    std::size_t place = 0;  ///< in the ring
  };

  void release();
  void run();
  void read(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] std::size_t after(std::size_t unit) const {
    return unit + 1 == units_.size() ? first_again_ : unit + 1;
  }
  /// Whether no unit that is there has bytes in the place of the next one.
  [[nodiscard]] bool has_room() const;

  std::shared_ptr<WeightFile> file_;
  std::vector<Unit> units_;
  std::size_t first_again_;
  HugeArray ring_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t first_ = 0;  ///< of those that are in the ring, which follow one another
  std::size_t count_ = 0;  ///< of these
  std::size_t next_ = 0;   ///< the one to read behind them
  /// How often what was read ahead was given up.
  std::uint64_t turn_ = 0;
  /// Why the next one could not be read; empty: it was not tried.
  std::string error_;
  bool stop_ = false;
  std::thread thread_;  // the last member: everything it uses is there when it starts
};

}  // namespace adaptrt
