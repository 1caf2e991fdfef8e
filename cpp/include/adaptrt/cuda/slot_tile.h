#pragma once

#include <cstdint>

namespace adaptrt::cuda {

/// The beginning of a tile of slots (expert_kernels.h) with one expert and one adapter. The next tile begins
/// where this one ends.
struct SlotTile {
  std::int32_t first;
  std::int32_t adapter_slot;  ///< -1: the base model
  std::int32_t expert;
};

}  // namespace adaptrt::cuda
