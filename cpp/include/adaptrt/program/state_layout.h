#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/program/program.h"

namespace adaptrt {

/// Where each layer's states are in a slot. A slot has all states of one sequence, in float32.
class StateLayout {
 public:
  explicit StateLayout(const Program& program);

  /// 0: the program keeps no states.
  [[nodiscard]] std::size_t slot_bytes() const { return slot_bytes_; }

  // Byte offsets in a slot, of layers that have such a state.

  /// A layer's convolution: float32 [taps - 1, columns].
  [[nodiscard]] std::size_t convolution(std::int32_t layer) const { return at(layer).convolution; }
  /// A layer's gated delta rule: float32 [value heads, key_dim, value_dim].
  [[nodiscard]] std::size_t delta(std::int32_t layer) const { return at(layer).delta; }
  /// A layer's selective scan: float32 [heads, state_dim, head_dim].
  [[nodiscard]] std::size_t scan(std::int32_t layer) const { return at(layer).scan; }

 private:
  struct Layer {
    std::size_t convolution = 0;
    std::size_t scan = 0;
    std::size_t delta = 0;
  };

  [[nodiscard]] const Layer& at(std::int32_t layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  /// Returns the offset of a state of so many floats, and makes the slot longer by it.
  std::size_t place(std::int64_t floats);

  std::vector<Layer> layers_;
  std::size_t slot_bytes_ = 0;
};

}  // namespace adaptrt
