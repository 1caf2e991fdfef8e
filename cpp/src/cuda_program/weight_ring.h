#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/device/device.h"

namespace adaptrt {

/// Weights that stay in pinned host memory and are copied to the device ahead of use. They are divided into
/// sections, which take turns in slots on the device: while a run uses one slot, a stream of the ring's own
/// fills the other. Every run uses all sections in order, so the first ones are copied during the end of the
/// run before.
class WeightRing {
 public:
  static constexpr std::size_t kSlots = 2;
  /// Alignment of each piece.
  static constexpr std::size_t kAlignment = 256;

  /// `section_bytes`: sizes of the sections, including the alignment of their pieces. Throws ConfigError if
  /// there is too little memory.
  WeightRing(Device& device, std::span<const std::size_t> section_bytes);

  /// Appends `bytes` to a section. Returns where they are on the device while the section is there, and the
  /// host memory that the caller fills before the first run.
  struct Place {
    std::byte* on_device = nullptr;
    std::byte* on_host = nullptr;
  };
  [[nodiscard]] Place append(std::size_t section, std::size_t bytes);

  /// Later work of `stream` waits until the section is on the device. Throws as Stream.
  void begin(std::size_t section, Stream& stream);
  /// The work of `stream` up to here was the last of this run with the section: its slot is filled again.
  void end(std::size_t section, Stream& stream);

 private:
  struct Section {
    std::byte* on_host = nullptr;
    std::size_t bytes = 0;
  };
  static constexpr std::size_t kNoSection = static_cast<std::size_t>(-1);
  struct Slot {
    Allocation memory;
    std::unique_ptr<Event> copied;
    std::unique_ptr<Event> used;
    std::size_t section = kNoSection;  ///< that it has or will have, when all copies are done
  };

  [[nodiscard]] Slot& slot_of(std::size_t section) { return slots_[section % kSlots]; }
  void fill(Slot& slot, std::size_t section);

  Allocation host_;
  std::vector<Section> sections_;
  std::array<Slot, kSlots> slots_;
  /// Destroyed first: its destructor waits for the copies.
  std::unique_ptr<Stream> stream_;
};

}  // namespace adaptrt
