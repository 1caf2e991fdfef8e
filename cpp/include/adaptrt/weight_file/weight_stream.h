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

/// Weights that are used unit by unit in a known order. A thread prefetches them into a ring buffer with room
/// for some of them.
class WeightStream {
 public:
  struct Unit {
    FilePages pages;
    /// True if the unit is prefetched only after expect() asks for it.
    bool is_unexpected = false;
  };

  /// Keeps a unit in the ring as long as this object exists.
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

  /// Units are used in the order of their numbers; units that are not expected are skipped. After the last
  /// one, the order continues with `first_again`. `ring_bytes` must be at least the bytes of any unit's
  /// pages. Throws std::bad_alloc.
  WeightStream(std::shared_ptr<WeightFile> file, std::vector<Unit> units, std::size_t ring_bytes,
               std::size_t first_again);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  [[nodiscard]] const HugeArray& ring() const { return ring_; }
  /// Address of a file byte of a unit, while the unit is held.
  [[nodiscard]] const std::byte* address_of(std::size_t unit, std::size_t offset) const;

  /// Sets whether a unit is prefetched from now on.
  void expect(std::size_t unit, bool is_expected);

  /// Waits until a unit is in the ring. Only one unit may be held at a time, by one thread. If it is not the
  /// next one, the prefetched units are discarded. Throws StepError if the read fails; the next call tries
  /// again.
  [[nodiscard]] Held hold(std::size_t unit);

 private:
  struct Placed {
    FilePages pages;
    std::size_t place = 0;  ///< offset in the ring
    bool is_expected = true;
  };

  void place_units(std::vector<Unit> units);
  void release();
  void run();
  void read(std::unique_lock<std::mutex>& lock);
  /// Returns the next expected unit after `unit`; `unit` itself if there is no other.
  [[nodiscard]] std::size_t after(std::size_t unit) const;
  /// True if no unit in the ring occupies the place of the next one.
  [[nodiscard]] bool has_room() const;

  std::shared_ptr<WeightFile> file_;
  std::vector<Placed> units_;
  std::size_t first_again_;
  HugeArray ring_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::size_t> there_;  ///< units in the ring, in the order of use
  std::size_t next_ = 0;           ///< the unit to read next
  /// Number of times that prefetched units were discarded.
  std::uint64_t turn_ = 0;
  /// Error of the last try to read the next unit; empty if there was none.
  std::string error_;
  bool stop_ = false;
  std::thread thread_;  // last member: everything that it uses exists when it starts
};

}  // namespace adaptrt
