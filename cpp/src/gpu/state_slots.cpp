#include "state_slots.h"

#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {

void StateSlots::allocate(std::int32_t num_slots, Device& device) {
  if (num_slots_ != 0) throw ConfigError("the states were allocated before");
  if (num_slots < 1) {
    throw ConfigError("num_slots is " + std::to_string(num_slots) + "; expected at least 1");
  }
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(slot_bytes_, static_cast<std::size_t>(num_slots), &bytes)) {
    throw ConfigError("the states of " + std::to_string(num_slots) + " sequences of " +
                      std::to_string(slot_bytes_) + " bytes each are larger than the address space");
  }
  memory_ = device.allocate(bytes);
  num_slots_ = num_slots;
}

void StateSlots::copy(std::span<const std::int32_t> from, std::span<const std::int32_t> to,
                      Stream& stream) const {
  for (std::size_t i = 0; i < from.size(); ++i) {
    stream.copy_on_device(slot(to[i]), slot(from[i]), slot_bytes_);
  }
}

void StateSlots::clear(std::int32_t index, Stream& stream) const {
  stream.fill_zero(slot(index), slot_bytes_);
}

}  // namespace adaptrt
