#include "adaptrt/weight_file/weight_slots.h"

#include <algorithm>
#include <utility>

namespace adaptrt {

WeightSlots::WeightSlots(std::shared_ptr<WeightFile> file, std::vector<FilePages> units,
                         std::size_t num_slots)
    : file_(std::move(file)),
      units_(std::move(units)),
      slot_of_(units_.size(), kNowhere),
      unit_in_(num_slots, kNowhere),
      used_at_(num_slots, 0) {
  for (const FilePages& unit : units_) slot_bytes_ = std::max(slot_bytes_, unit.bytes());
  memory_ = HugeArray(slot_bytes_ * num_slots);
}

void WeightSlots::bring(std::span<const std::size_t> units) {
  ++calls_;
  for (const std::size_t unit : units) {
    if (slot_of_[unit] != kNowhere) used_at_[static_cast<std::size_t>(slot_of_[unit])] = calls_;
  }
  for (const std::size_t unit : units) {
    if (slot_of_[unit] != kNowhere) continue;
    const std::size_t slot = slot_to_give_up();
    if (unit_in_[slot] != kNowhere) slot_of_[static_cast<std::size_t>(unit_in_[slot])] = kNowhere;
    unit_in_[slot] = kNowhere;
    file_->read(units_[unit], memory_.data() + slot * slot_bytes_);
    unit_in_[slot] = static_cast<std::int32_t>(unit);
    slot_of_[unit] = static_cast<std::int32_t>(slot);
    used_at_[slot] = calls_;
  }
}

std::size_t WeightSlots::slot_to_give_up() const {
  return static_cast<std::size_t>(std::ranges::min_element(used_at_) - used_at_.begin());
}

const std::byte* WeightSlots::address_of(std::size_t unit, std::size_t offset) const {
  const auto slot = static_cast<std::size_t>(slot_of_[unit]);
  return memory_.data() + slot * slot_bytes_ + units_[unit].place_of(offset);
}

}  // namespace adaptrt
