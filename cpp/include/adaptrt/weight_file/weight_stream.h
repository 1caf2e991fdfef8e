#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
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
  struct Unit {
    FilePages pages;
    /// Not expected to be used unless expect() says otherwise.
    bool is_exception = false;
  };

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

  /// Units are used in the order of their numbers; units that are not expected are skipped. `first_again`
  /// follows the last one. `ring_bytes`: at least those of every unit's pages. Throws std::bad_alloc.
  WeightStream(std::shared_ptr<WeightFile> file, std::vector<Unit> units, std::size_t ring_bytes,
               std::size_t first_again);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  [[nodiscard]] const HugeArray& ring() const { return ring_; }
  /// Where a byte of the file that belongs to a unit lies while the unit is held.
  [[nodiscard]] const std::byte* address_of(std::size_t unit, std::size_t offset) const;

  /// Sets whether a unit is prefetched from now on.
  void expect(std::size_t unit, bool is_expected);

  /// Waits until a unit is in the ring; one at a time, of one thread. Another than the next one may be asked
  /// for: what was read ahead is given up then. Throws StepError when it cannot be read; it is tried again
  /// when it is asked for again.
  [[nodiscard]] Held hold(std::size_t unit);

 private:
  struct Placed {
    FilePages pages;
    std::size_t place = 0;  ///< in the ring
    bool is_expected = true;
  };

  void place_units(std::vector<Unit> units);
  void release();
  void run();
  void read(std::unique_lock<std::mutex>& lock);
  /// The next expected one; `unit` itself where there is no other.
  [[nodiscard]] std::size_t after(std::size_t unit) const;
  /// True if no unit in the ring occupies the place of the next one.
  [[nodiscard]] bool has_room() const;

  std::shared_ptr<WeightFile> file_;
  std::vector<Placed> units_;
  std::size_t first_again_;
  HugeArray ring_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::size_t> there_;  ///< those that are in the ring, in the order of their use
  std::size_t next_ = 0;           ///< the unit to read after them
  /// Number of times that prefetched units were discarded.
  std::uint64_t turn_ = 0;
  /// Why the next one could not be read; empty: it was not tried.
  std::string error_;
  bool stop_ = false;
  std::thread thread_;  // the last member: everything it uses is there when it starts
};

}  // namespace adaptrt
