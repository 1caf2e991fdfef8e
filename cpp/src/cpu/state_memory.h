#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/thread_pool.h"
#include "adaptrt/program/program.h"
#include "adaptrt/program/state_layout.h"

namespace adaptrt {

/// The states of sequences, in slots. A slot has the states of all layers of one sequence, in float32.
class StateMemory {
 public:
  explicit StateMemory(const Program& program) : layout_(program) {}

  /// Throws ConfigError if the system refuses the memory, if this was called before, or for no slots.
  void allocate(std::int32_t num_slots);

  /// Copies slots from[i] to to[i], in order.
  void copy(std::span<const std::int32_t> from, std::span<const std::int32_t> to, ThreadPool& threads);
  /// Fills a slot with zeros.
  void clear(std::int32_t slot, ThreadPool& threads);

  /// Copy the slot_bytes() of a slot out of it or into it. Throw EngineError for another slot or size.
  void read(std::int32_t slot, std::span<std::byte> bytes) const;
  void write(std::int32_t slot, std::span<const std::byte> bytes);

  [[nodiscard]] std::int32_t num_slots() const { return num_slots_; }
  [[nodiscard]] std::size_t slot_bytes() const { return layout_.slot_bytes(); }

  /// float32 [taps - 1, columns] of a layer's convolution.
  [[nodiscard]] float* convolution(std::int32_t slot, std::int32_t layer) const {
    return state(slot, layout_.convolution(layer));
  }
  /// float32 [value heads, key_dim, value_dim] of a layer's gated delta rule.
  [[nodiscard]] float* delta(std::int32_t slot, std::int32_t layer) const {
    return state(slot, layout_.delta(layer));
  }
  /// float32 [heads, state_dim, head_dim] of a layer's selective scan.
  [[nodiscard]] float* scan(std::int32_t slot, std::int32_t layer) const {
    return state(slot, layout_.scan(layer));
  }

 private:
  void require_slot(std::int32_t slot, std::size_t bytes) const;
  [[nodiscard]] std::byte* slot(std::int32_t slot) const {
    return memory_.data() + static_cast<std::size_t>(slot) * slot_bytes();
  }
  [[nodiscard]] float* state(std::int32_t slot_index, std::size_t offset) const {
    return reinterpret_cast<float*>(slot(slot_index) + offset);
  }

  StateLayout layout_;
  std::int32_t num_slots_ = 0;
  HugeArray memory_;
};

}  // namespace adaptrt
