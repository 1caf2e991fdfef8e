#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/weight_file/weight_file.h"

namespace adaptrt {

/// Slots in memory for weights of which few are used at a time, in an order that is unknown in advance. If no
/// slot is free, the least recently used unit is evicted. Only one thread may use it.
class WeightSlots {
 public:
  /// Throws std::bad_alloc.
  WeightSlots(std::shared_ptr<WeightFile> file, std::vector<FilePages> units, std::size_t num_slots);

  [[nodiscard]] std::size_t num_slots() const { return unit_in_.size(); }
  [[nodiscard]] const HugeArray& memory() const { return memory_; }

  /// Brings units, at most num_slots() and without duplicates, into slots, where they stay until the next
  /// call. Throws StepError if a read fails.
  void bring(std::span<const std::size_t> units);
  /// Address of a file byte of a unit, which must be in a slot.
  [[nodiscard]] const std::byte* address_of(std::size_t unit, std::size_t offset) const;

 private:
  static constexpr std::int32_t kNowhere = -1;

  [[nodiscard]] std::size_t slot_to_give_up() const;

  std::shared_ptr<WeightFile> file_;
  std::vector<FilePages> units_;
  std::size_t slot_bytes_ = 0;
  std::vector<std::int32_t> slot_of_;   ///< indexed by unit
  std::vector<std::int32_t> unit_in_;   ///< indexed by slot
  std::vector<std::uint64_t> used_at_;  ///< indexed by slot: number of the bring() call
  std::uint64_t calls_ = 0;
  HugeArray memory_;
};

}  // namespace adaptrt
