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
#include "adaptrt/tensorrt/plan_context.h"

namespace adaptrt {

/// What a step may have at most to run in one of the plan's optimization profiles. Every profile takes a step
/// of one token.
struct TensorRtProfile {
  std::int32_t max_tokens = 0;
  std::int32_t max_sequences = 0;
  std::int32_t max_logit_rows = 0;
};

/// A weight that is an input of the plan instead of a constant in it.
struct TensorRtWeight {
  std::string name;  ///< the input's
  std::span<const std::byte> data;
  std::vector<std::int64_t> shape;
  /// Keeps `data` alive.
  std::shared_ptr<const void> owner;
};

/// What the session must know of a plan. Its inputs and outputs are those of the network (see
/// docs/formats.md): int32 input_ids[T], positions[T], sequence_offsets[S + 1], prompt_lengths[S] where the
/// rotary embedding depends on them, block_tables[S, max_blocks], logit_rows[R]; with LoRA adapter_slots[S],
/// lora_ranks[slots, layers, modules], int64 lora_pointers[slots, layers, modules, 3]; in the engine's type
/// kv_pool.{layer}[blocks, 2, kv_heads, tokens_per_block, head_dim], which is the output kv_pool_out.{layer}
/// as well; and the output float32 logits[R, vocab_size].
struct TensorRtProgram {
  DType dtype = DType::kFloat16;
  std::int64_t vocab_size = 0;
  std::int32_t num_layers = 0;
  std::vector<AttentionShape> attention;  ///< of each layer
  std::int32_t max_batch_size = 0;
  std::int32_t max_num_tokens = 0;
  std::int32_t max_input_len = 0;
  std::int32_t max_seq_len = 0;
  std::int32_t max_beam_width = 1;
  std::int32_t tokens_per_block = 0;
  /// See EngineInfo.
  std::int32_t max_reusable_prompt_len = 0;
  bool has_prompt_lengths = false;
  /// The largest KV pool that the plan takes.
  std::int32_t max_kv_blocks = 0;
  /// Rows of the adapters' tables; 0 without LoRA.
  std::int32_t num_adapter_slots = 0;
  TensorRtProfile prefill;  ///< any step
  TensorRtProfile decode;   ///< steps of one token a sequence
  std::vector<TensorRtWeight> weights;
  LoraLayout lora;

  /// Everything that is inconsistent.
  [[nodiscard]] Problems validate() const;
};

/// An execution context for each profile.
struct TensorRtContexts {
  std::unique_ptr<PlanContext> prefill;
  std::unique_ptr<PlanContext> decode;
};

struct TensorRtOptions {
  /// Decode steps are launches of CUDA graphs, one for each of the batch sizes 1, 2, 4, 8, ... max_batch_size
  /// and each power of two of blocks a sequence, captured when a step first needs it. The step is filled up
  /// with sequences of one token that have no block.
  bool cuda_graphs = true;
};

/// The engine that runs a TensorRT plan on `device`. Weights are copied to the device and may go when this
/// returns.
///
/// A step is one copy to the device (and one for each adapter that is new in the tables), one run of the plan
/// or of its graph, and one copy of the wanted rows of logits to the host: penalties, log probabilities and
/// the sampler's bit-exact choice are the same code on both engines, and a request may want its logits
/// anyway. A step with more logit rows than the profile takes runs once for each slice of them; what it
/// writes to the KV pool is the same each time.
///
/// Throws EngineError with all of program.validate()'s problems, ConfigError when the device has no memory
/// left, StepError when it fails. An engine whose step() threw StepError goes on with the next step; after
/// EngineError the device is lost.
[[nodiscard]] std::unique_ptr<Engine> make_tensorrt_engine(TensorRtProgram program,
                                                           std::shared_ptr<Device> device,
                                                           TensorRtContexts contexts,
                                                           TensorRtOptions options);

}  // namespace adaptrt
