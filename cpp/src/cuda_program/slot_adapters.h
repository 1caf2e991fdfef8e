#pragma once

#include <cstdint>

#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/slot_tile.h"
#include "cuda_memory.h"
#include "cuda_op.h"

namespace adaptrt {

/// The adapters of a layer of experts, or of the heads of latent attention, in place.
class SlotAdapters {
 public:
  /// x: T [slots, in].
  SlotAdapters(const cuda::LoraKernel::Config& config, const CudaMemory& memory, const void* x,
               std::int64_t in, void* y)
      : kernel_(config), tables_(*memory.adapters()), workspace_(memory.workspace()), x_(x), in_(in), y_(y) {}

  void enqueue(const CudaRun& run, std::int64_t slots, std::int64_t tiles, const cuda::SlotTile* list) const {
    kernel_.enqueue({.tokens = slots, .in = in_, .layers = tables_.ranks.dims[1], .tiles = tiles},
                    {.x = x_,
                     .base = y_,
                     .ranks = reinterpret_cast<const std::int32_t*>(tables_.ranks.address),
                     .pointers = reinterpret_cast<const std::int64_t*>(tables_.pointers.address),
                     .shifts = reinterpret_cast<const std::int64_t*>(tables_.shifts.address),
                     .tiles = list},
                    y_, workspace_, run.stream);
  }

 private:
  cuda::LoraKernel kernel_;
  const AdapterArrays& tables_;
  void* workspace_;
  const void* x_;
  std::int64_t in_;
  void* y_;
};

/// Maximum number of slots of a tile.
[[nodiscard]] inline std::int32_t tile_slots(std::int64_t slots) {
  return cuda::LoraKernel::tile_tokens(slots, cuda::LoraKernel::kManyTokensFrom);
}

/// Number of ranges of a run's tokens with one adapter each.
[[nodiscard]] inline std::int64_t adapter_ranges(const CudaRun& run) {
  return run.shape.sequences + run.shape.split_sequences;
}

}  // namespace adaptrt
