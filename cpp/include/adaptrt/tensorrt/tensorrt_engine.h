#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/gpu/gpu_engine.h"
#include "adaptrt/gpu/gpu_model_description.h"
#include "adaptrt/tensorrt/plan_context.h"

namespace adaptrt {

/// A weight that is an input of the plan instead of a constant in it.
struct TensorRtWeight {
  std::string name;  ///< name of the plan's input
  std::span<const std::byte> data;
  std::vector<std::int64_t> shape;
  /// Keeps `data` alive.
  std::shared_ptr<const void> owner;
};

/// A plan. Its two optimization profiles have the limits model.prefill and model.decode. Inputs and outputs
/// are those of the network (see docs/formats.md):
/// - int32 input_ids[T], positions[T], sequence_offsets[S + 1], block_tables[S, max_blocks], logit_rows[R]
/// - prompt_lengths[S], if the rotary embedding depends on them
/// - with LoRA: adapter_slots[S], lora_ranks[slots, layers, modules], int64 lora_pointers[slots, layers,
///   modules, 3]
/// - in the engine's type: kv_pool.{layer}[blocks, 2, kv_heads, tokens_per_block, head_dim], updated in place
///   as the output kv_pool_out.{layer}
/// - output: float32 logits[R, vocab_size]
struct TensorRtProgram {
  GpuModelDescription model;
  std::vector<TensorRtWeight> weights;
};

/// One execution context per profile.
struct TensorRtContexts {
  std::unique_ptr<PlanContext> prefill;
  std::unique_ptr<PlanContext> decode;
};

/// Makes the engine that runs a TensorRT plan on `device` (see make_gpu_engine). Weights are copied to the
/// device; their owners may be released when this returns.
[[nodiscard]] std::unique_ptr<Engine> make_tensorrt_engine(TensorRtProgram program,
                                                           std::shared_ptr<Device> device,
                                                           TensorRtContexts contexts,
                                                           GpuEngineOptions options);

}  // namespace adaptrt
