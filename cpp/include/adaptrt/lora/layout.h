#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/lora/modules.h"

namespace adaptrt {

/// At most this many modules share one input (q, k and v).
inline constexpr std::size_t kMaxPartsPerSite = 3;

/// A module's share of a linear layer's output.
struct LoraPart {
  LoraModule module = LoraModule::kAttnQ;
  std::int64_t out_size = 0;
};

/// A place in the network where adapters act: one linear layer whose parts share an input. The fused modules
/// attn_qkv and mlp_gate_up are no parts: their B is cut into the parts' when an adapter is packed.
struct LoraSite {
  std::int32_t layer = 0;
  std::int64_t in_size = 0;
  std::vector<LoraPart> parts;
};

/// What an engine accepts of adapters. Part of the engine; the LoRA cache is made from it.
struct LoraLayout {
  /// Storage type on the device, equal to the engine's.
  DType dtype = DType::kFloat32;
  std::int32_t num_layers = 0;
  std::int32_t max_rank = 0;
  bool dora_enabled = false;
  ModelShape shape;
  /// Modules that --lora_target_modules enabled; empty when the engine was built without LoRA.
  std::vector<LoraModule> target_modules;
  /// In the order of execution. LinearOp::lora_site indexes it.
  std::vector<LoraSite> sites;
};

/// One part of one adapter at one site, in the kernels' layout. Pointers are into the cache's pages.
struct DevicePart {
  /// 0: the adapter does not change this part.
  std::int32_t rank = 0;
  /// First column of this part's A within the site's A.
  std::int32_t rank_offset = 0;
  /// Panels of B[out_size, rank]; the scale is already in it.
  const std::byte* b = nullptr;
  /// float32[out_size], the normalised DoRA magnitudes; nullptr for plain LoRA.
  const float* magnitude = nullptr;
};

struct DeviceSite {
  /// Output features of A: the sum over the modules of this site. 0: nothing here.
  std::int32_t total_rank = 0;
  /// Panels of A[total_rank, in_size].
  const std::byte* a = nullptr;
  std::array<DevicePart, kMaxPartsPerSite> parts;
};

/// An adapter as an engine step reads it; sites are those of the LoraLayout.
struct DeviceAdapter {
  std::uint64_t task_id = 0;
  std::vector<DeviceSite> sites;
};

}  // namespace adaptrt
