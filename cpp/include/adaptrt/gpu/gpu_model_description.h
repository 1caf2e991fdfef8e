#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Maximum sizes of a step. Every model accepts a step of one token.
struct GpuStepLimits {
  std::int32_t max_tokens = 0;
  std::int32_t max_sequences = 0;
  std::int32_t max_logit_rows = 0;
};

/// Sizes of a model on a device, from which the session follows.
struct GpuModelDescription {
  DType dtype = DType::kFloat16;
  /// True if the KV pools are int8, and have a float32 scale for each key and value.
  bool int8_kv_cache = false;
  std::int64_t vocab_size = 0;
  std::int32_t num_layers = 0;
  /// One per layer; without heads for layers that have no KV pool of their own.
  std::vector<AttentionShape> attention;
  std::int32_t max_batch_size = 0;
  std::int32_t max_num_tokens = 0;
  std::int32_t max_input_len = 0;
  std::int32_t max_seq_len = 0;
  std::int32_t max_beam_width = 1;
  std::int32_t tokens_per_block = 0;
  /// See EngineInfo.
  std::int32_t max_reusable_prompt_len = 0;
  bool has_prompt_lengths = false;
  /// Maximum number of KV blocks that the model accepts.
  std::int32_t max_kv_blocks = 0;
  /// Number of rows of the adapter tables; 0 without LoRA.
  std::int32_t num_adapter_slots = 0;
  GpuStepLimits prefill;  ///< any step
  GpuStepLimits decode;   ///< steps of one token per sequence
  LoraLayout lora;
  /// True if the model writes GpuModelArrays::best_tokens.
  bool finds_best_tokens = false;
  /// True if the model has find_highest().
  bool finds_highest_logits = false;
  /// True if the model does less work in runs without RunShape::has_adapters.
  bool skips_unused_adapters = false;
  /// True if the model reads StepPlaces::adapter_offsets, and adapters may begin at a position of a sequence.
  bool has_adapter_start_positions = false;
  /// True if the model reads AdapterArrays::shifts, and adapters may have shifts.
  bool adds_shifts = false;
  /// See EngineInfo.
  std::size_t state_bytes = 0;

  /// See EngineInfo.
  [[nodiscard]] std::int64_t logits_width() const { return vocab_size + lora.max_extra_tokens; }
  /// Lists all inconsistencies.
  [[nodiscard]] Problems validate() const;
  /// Returns the EngineInfo of an engine with this model.
  [[nodiscard]] EngineInfo engine_info(std::size_t kv_block_bytes) const;
};

}  // namespace adaptrt
