#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "adaptrt/device/device.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/ops.h"
#include "adaptrt/tensorrt/plan_context.h"

namespace adaptrt {

/// Limits of a step in one of the plan's optimization profiles. Every profile accepts a step of one token.
struct TensorRtProfile {
  std::int32_t max_tokens = 0;
  std::int32_t max_sequences = 0;
  std::int32_t max_logit_rows = 0;
};

/// A weight that is an input of the plan instead of a constant in it.
struct TensorRtWeight {
  std::string name;  ///< name of the plan's input
  std::span<const std::byte> data;
  std::vector<std::int64_t> shape;
  /// Keeps `data` alive.
  std::shared_ptr<const void> owner;
};

/// The session's description of a plan. Inputs and outputs are those of the network (see docs/formats.md):
/// - int32 input_ids[T], positions[T], sequence_offsets[S + 1], block_tables[S, max_blocks], logit_rows[R]
/// - prompt_lengths[S], if the rotary embedding depends on them
/// - with LoRA: adapter_slots[S], lora_ranks[slots, layers, modules], int64 lora_pointers[slots, layers,
///   modules, 3]
/// - in the engine's type: kv_pool.{layer}[blocks, 2, kv_heads, tokens_per_block, head_dim], updated in place
///   as the output kv_pool_out.{layer}
/// - output: float32 logits[R, vocab_size]
struct TensorRtProgram {
  DType dtype = DType::kFloat16;
  std::int64_t vocab_size = 0;
  std::int32_t num_layers = 0;
  std::vector<AttentionShape> attention;  ///< one per layer
  std::int32_t max_batch_size = 0;
  std::int32_t max_num_tokens = 0;
  std::int32_t max_input_len = 0;
  std::int32_t max_seq_len = 0;
  std::int32_t max_beam_width = 1;
  std::int32_t tokens_per_block = 0;
  /// See EngineInfo.
  std::int32_t max_reusable_prompt_len = 0;
  bool has_prompt_lengths = false;
  /// Maximum number of KV blocks that the plan accepts.
  std::int32_t max_kv_blocks = 0;
  /// Number of rows of the adapter tables; 0 without LoRA.
  std::int32_t num_adapter_slots = 0;
  TensorRtProfile prefill;  ///< any step
  TensorRtProfile decode;   ///< steps of one token per sequence
  std::vector<TensorRtWeight> weights;
  LoraLayout lora;

  /// Lists all inconsistencies.
  [[nodiscard]] Problems validate() const;
};

/// One execution context per profile.
struct TensorRtContexts {
  std::unique_ptr<PlanContext> prefill;
  std::unique_ptr<PlanContext> decode;
};

struct TensorRtOptions {
  /// Run decode steps as CUDA graphs. There is one graph for each batch size 1, 2, 4, 8, ... max_batch_size
  /// and each power of two of blocks per sequence. A graph is captured when a step first needs it. Steps are
  /// padded with sequences of one token that have no block.
  bool cuda_graphs = true;
};

/// Makes the engine that runs a TensorRT plan on `device`. Weights are copied to the device; their owners may
/// be released when this returns.
///
/// A step makes one copy to the device (and one for each adapter new in the tables), runs the plan or its
/// graph once, and copies the wanted logit rows to the host. Penalties, log probabilities and bit-exact
/// sampling run on the host with the same code as the CPU engine, and a request may want its logits anyway. A
/// step with more logit rows than the profile allows runs once for each slice of rows; each run writes the
/// same values to the KV pool.
///
/// Throws EngineError with all of program.validate()'s problems, ConfigError if the device has no memory
/// left, StepError if the device fails. After a StepError from step(), the engine can run the next step;
/// after an EngineError the device is lost.
[[nodiscard]] std::unique_ptr<Engine> make_tensorrt_engine(TensorRtProgram program,
                                                           std::shared_ptr<Device> device,
                                                           TensorRtContexts contexts,
                                                           TensorRtOptions options);

}  // namespace adaptrt
