#include "adapter_table.h"

#include <algorithm>
#include <cstring>

#include "adaptrt/lora/modules.h"

namespace adaptrt {
namespace {

/// Number of addresses per entry: A, B and the magnitudes.
constexpr std::size_t kPointers = 3;

std::int64_t address_of(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // namespace

AdapterTable::AdapterTable(const GpuModelDescription& model, Device& device, Stream& stream)
    : layout_(model.lora),
      places_(layout_),
      entries_(static_cast<std::size_t>(places_.count())),
      slots_(static_cast<std::size_t>(model.num_adapter_slots)) {
  const std::size_t ranks_bytes = slots_.size() * entries_ * sizeof(std::int32_t);
  const std::size_t pointers_bytes = slots_.size() * entries_ * kPointers * sizeof(std::int64_t);
  ranks_ = device.allocate(ranks_bytes);
  pointers_ = device.allocate(pointers_bytes);
  host_ranks_ = device.allocate_pinned(ranks_bytes);
  host_pointers_ = device.allocate_pinned(pointers_bytes);
  stream.fill_zero(ranks_.data(), ranks_bytes);
  stream.fill_zero(pointers_.data(), pointers_bytes);
  if (!model.adds_shifts) return;
  const std::size_t shifts_bytes = slots_.size() * entries_ * sizeof(std::int64_t);
  shifts_ = device.allocate(shifts_bytes);
  host_shifts_ = device.allocate_pinned(shifts_bytes);
  stream.fill_zero(shifts_.data(), shifts_bytes);
}

AdapterArrays AdapterTable::arrays() const {
  const auto slots = static_cast<std::int64_t>(slots_.size());
  const std::int64_t rows = places_.rows();
  return {.ranks = {.dims = {slots, rows, kNumLoraModules}, .address = ranks_.data()},
          .pointers = {.dims = {slots, rows, kNumLoraModules, kPointers}, .address = pointers_.data()},
          .shifts = {.dims = {slots, rows, kNumLoraModules}, .address = shifts_.data()}};
}

std::span<const std::int32_t> AdapterTable::place(std::span<const DeviceAdapter* const> adapters,
                                                  Stream& stream) {
  ++step_;
  // Adapters that have a slot come first, so that no other adapter of this step takes it.
  for (const DeviceAdapter* adapter : adapters) {
    if (adapter == nullptr) continue;
    const auto found = slot_by_load_id_.find(adapter->load_id);
    if (found != slot_by_load_id_.end()) slots_[found->second].last_step = step_;
  }
  slot_of_sequence_.clear();
  for (const DeviceAdapter* adapter : adapters) {
    slot_of_sequence_.push_back(adapter == nullptr ? kNoSlot : slot_of(*adapter, stream));
  }
  return slot_of_sequence_;
}

void AdapterTable::forget() {
  slot_by_load_id_.clear();
  std::ranges::fill(slots_, Slot{});
}

std::int32_t AdapterTable::slot_of(const DeviceAdapter& adapter, Stream& stream) {
  const auto found = slot_by_load_id_.find(adapter.load_id);
  if (found != slot_by_load_id_.end()) return static_cast<std::int32_t>(found->second);
  const std::size_t slot = least_recently_used();
  if (slots_[slot].last_step != 0) slot_by_load_id_.erase(slots_[slot].load_id);
  slots_[slot] = {adapter.load_id, step_};
  slot_by_load_id_[adapter.load_id] = slot;
  write_row(slot, adapter, stream);
  return static_cast<std::int32_t>(slot);
}

std::size_t AdapterTable::least_recently_used() const {
  return static_cast<std::size_t>(std::ranges::min_element(slots_, {}, &Slot::last_step) - slots_.begin());
}

void AdapterTable::write_row(std::size_t slot, const DeviceAdapter& adapter, Stream& stream) {
  const std::size_t ranks_bytes = entries_ * sizeof(std::int32_t);
  const std::size_t pointers_bytes = entries_ * kPointers * sizeof(std::int64_t);
  const std::size_t shifts_bytes = host_shifts_.bytes() / slots_.size();
  std::byte* shift_row = host_shifts_.data() + slot * shifts_bytes;
  std::byte* rank_row = host_ranks_.data() + slot * ranks_bytes;
  std::byte* pointer_row = host_pointers_.data() + slot * pointers_bytes;
  std::memset(rank_row, 0, ranks_bytes);
  std::memset(pointer_row, 0, pointers_bytes);
  if (shifts_bytes > 0) std::memset(shift_row, 0, shifts_bytes);
  for (std::size_t i = 0; i < layout_.sites.size(); ++i) {
    const LoraSite& site = layout_.sites[i];
    const DeviceSite& found = adapter.sites[i];
    for (std::size_t p = 0; p < site.parts.size(); ++p) {
      const DevicePart& part = found.parts[p];
      if (part.rank == 0) continue;
      const std::size_t a_offset =
          static_cast<std::size_t>(part.rank_offset * site.in_size) * size_of(layout_.dtype);
      const auto entry = static_cast<std::size_t>(places_.entry(i, p));
      reinterpret_cast<std::int32_t*>(rank_row)[entry] = part.rank;
      std::int64_t* pointers = reinterpret_cast<std::int64_t*>(pointer_row) + entry * kPointers;
      pointers[0] = address_of(found.a + a_offset);
      pointers[1] = address_of(part.b);
      pointers[2] = address_of(part.magnitude);
      if (shifts_bytes > 0) reinterpret_cast<std::int64_t*>(shift_row)[entry] = address_of(part.shift);
    }
  }
  stream.copy_to_device(ranks_.data() + slot * ranks_bytes, rank_row, ranks_bytes);
  stream.copy_to_device(pointers_.data() + slot * pointers_bytes, pointer_row, pointers_bytes);
  if (shifts_bytes > 0) stream.copy_to_device(shifts_.data() + slot * shifts_bytes, shift_row, shifts_bytes);
}

}  // namespace adaptrt
