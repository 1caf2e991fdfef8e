#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "adaptrt/cuda/slot_tile.h"
#include "adaptrt/device/device.h"
#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// Memory of mixtures of experts, for the largest run; nullptr without experts. See cuda/expert_kernels.h.
struct ExpertMemory {
  std::int32_t* chosen = nullptr;
  float* weights = nullptr;
  std::int32_t* offsets = nullptr;
  std::int32_t* entries = nullptr;
  std::int32_t* slots_of = nullptr;
  std::int32_t* expert_of = nullptr;
  cuda::SlotTile* tiles = nullptr;
  std::byte* gate_up = nullptr;    ///< T [slots, 2 * width between the layers]
  std::byte* activated = nullptr;  ///< T [slots, width between the layers]
  /// T [slots, hidden]; first, the inputs of gate and up for adapters, or multiplied by their weights
  std::byte* down = nullptr;
};

/// Memory of latent attention, for the largest run; nullptr without. See cuda/latent_kernels.h.
struct LatentMemory {
  std::int32_t* offsets = nullptr;
  cuda::SlotTile* tiles = nullptr;
  std::byte* inputs = nullptr;   ///< T [slots, width of a head's input]
  std::byte* outputs = nullptr;  ///< T [slots, width of a head's output]
};

/// Device memory of a model that its ops share. Sizes are for the largest run.
class CudaMemory {
 public:
  /// Throws ConfigError if the device has no memory left. Work that uses the memory comes after that of
  /// `stream`.
  CudaMemory(const Program& program, const GpuModelArrays& arrays, Device& device, Stream& stream);

  [[nodiscard]] std::byte* buffer(BufferId id) const { return buffers_[static_cast<std::size_t>(id)]; }
  /// Output of a linear layer that a later op adds to a residual stream: T [max_num_tokens, width].
  [[nodiscard]] std::byte* addend() const { return addend_.data(); }
  /// Output of a linear layer before its activation: T [max_num_tokens, width of all parts]. In an MLP with
  /// neurons, first the gate and then up, each T [max_num_tokens, neurons]. In attention,
  /// the values that come from keys, in the first columns of rows as wide as qkv.
  [[nodiscard]] std::byte* product() const { return product_.data(); }
  /// Product of a linear layer with has_padded_output(): float32 [rows, padded_rows()].
  [[nodiscard]] std::byte* padded_output() const { return padded_output_.data(); }
  /// Workspace of the kernels, which use it one after another.
  [[nodiscard]] std::byte* workspace() const { return workspace_.data(); }
  /// Counters of PagedAttentionKernel, which all attention ops use one after another. They are zero whenever
  /// none of them runs.
  [[nodiscard]] std::uint32_t* attention_counters() const {
    return reinterpret_cast<std::uint32_t*>(attention_counters_.data());
  }
  /// Masks of the active neurons of an MLP; see cuda::MarkActive.
  [[nodiscard]] std::uint16_t* neuron_masks() const {
    return reinterpret_cast<std::uint16_t*>(neuron_masks_.data());
  }
  [[nodiscard]] const ExpertMemory& experts() const { return experts_; }
  [[nodiscard]] const LatentMemory& latent() const { return latent_; }
  /// Tables of adapters; nullopt without LoRA.
  [[nodiscard]] const std::optional<AdapterArrays>& adapters() const { return adapters_; }

 private:
  void allocate_experts(const Program& program, Device& device);
  void allocate_latent(const Program& program, Device& device);

  std::byte* logits_;
  std::optional<AdapterArrays> adapters_;
  Allocation arena_;
  std::vector<std::byte*> buffers_;
  Allocation addend_;
  Allocation product_;
  Allocation padded_output_;
  Allocation workspace_;
  Allocation attention_counters_;
  Allocation neuron_masks_;
  Allocation expert_arrays_;
  ExpertMemory experts_;
  Allocation latent_arrays_;
  LatentMemory latent_;
};

}  // namespace adaptrt
