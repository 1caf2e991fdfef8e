#include "weight_ring.h"

#include <algorithm>
#include <numeric>

namespace adaptrt {

WeightRing::WeightRing(Device& device, std::span<const std::size_t> section_bytes)
    : host_(device.allocate_pinned(
          std::accumulate(section_bytes.begin(), section_bytes.end(), std::size_t{0}))),
      stream_(device.make_stream()) {
  std::byte* next = host_.data();
  for (const std::size_t bytes : section_bytes) {
    sections_.push_back({.on_host = next});
    next += bytes;
  }
  const std::size_t slot_bytes = std::ranges::max(section_bytes);
  for (Slot& slot : slots_) {
    slot.memory = device.allocate(slot_bytes);
    slot.copied = device.make_event();
    slot.used = device.make_event();
  }
}

WeightRing::Place WeightRing::append(std::size_t section, std::size_t bytes) {
  Section& to = sections_[section];
  const Place place{.on_device = slot_of(section).memory.data() + to.bytes, .on_host = to.on_host + to.bytes};
  to.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return place;
}

void WeightRing::begin(std::size_t section, Stream& stream) {
  Slot& slot = slot_of(section);
  // It has another section before the first run, and after a run that failed.
  if (slot.section != section) fill(slot, section);
  stream.wait(*slot.copied);
}

void WeightRing::end(std::size_t section, Stream& stream) {
  Slot& slot = slot_of(section);
  stream.record(*slot.used);
  const std::size_t next = section + kSlots;
  fill(slot, next < sections_.size() ? next : section % kSlots);
}

void WeightRing::fill(Slot& slot, std::size_t section) {
  if (slot.section == section) return;
  slot.section = kNoSection;
  const Section& from = sections_[section];
  stream_->wait(*slot.used);
  stream_->copy_to_device(slot.memory.data(), from.on_host, from.bytes);
  stream_->record(*slot.copied);
  slot.section = section;
}

}  // namespace adaptrt
