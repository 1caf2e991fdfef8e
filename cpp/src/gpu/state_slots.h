#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// The states of sequences on a device, in slots of `slot_bytes` each.
class StateSlots {
 public:
  explicit StateSlots(std::size_t slot_bytes) : slot_bytes_(slot_bytes) {}

  /// Returns 0 before allocate().
  [[nodiscard]] std::int32_t num_slots() const { return num_slots_; }
  [[nodiscard]] std::byte* data() const { return memory_.data(); }

  /// Throws ConfigError if the memory cannot be allocated, for no slots, or on a second call.
  void allocate(std::int32_t num_slots, Device& device);
  /// Copies slots from[i] to to[i], in order.
  void copy(std::span<const std::int32_t> from, std::span<const std::int32_t> to, Stream& stream) const;
  /// Fills a slot with zeros.
  void clear(std::int32_t slot, Stream& stream) const;

 private:
  [[nodiscard]] std::byte* slot(std::int32_t index) const {
    return memory_.data() + static_cast<std::size_t>(index) * slot_bytes_;
  }

  std::size_t slot_bytes_;
  std::int32_t num_slots_ = 0;
  Allocation memory_;
};

}  // namespace adaptrt
