#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/program/ops.h"
#include "adaptrt/weight_file/mapped_file.h"

namespace adaptrt {

/// An activation buffer. Buffers that live at the same time have disjoint bytes [offset, offset + max rows *
/// width * element size).
struct Buffer {
  std::string name;
  DType dtype = DType::kFloat32;
  RowKind rows = RowKind::kTokens;
  std::int64_t width = 0;
  /// Byte offset in the activation arena, a multiple of 64.
  std::size_t offset = 0;
};

/// A compiled network: three sections of ops in order of execution.
///
/// - `encoder` runs once in a step with encoder inputs, over their tokens. The other sections see only the
///   keys and values that its CrossKeysOps store.
/// - `body` runs once per step over the step's tokens; after a KeepLogitRowsOp, over the requested rows.
/// - `head` runs once for each slice of logit rows and writes `logits` [rows, logits_width()]. For rows whose
///   hidden states are requested, it runs up to the op that writes `hidden`.
///
/// The body's attention is either causal, or bidirectional in all layers. A bidirectional body keeps nothing
/// from step to step.
///
/// In a pipeline each stage has a program. The first one has the ops before the layers, the last one the
/// head. Layers are counted within the stage; only adapters' sites count them for the whole model. If there
/// is an encoder, each stage has some of its layers and some of the body's. A BroadcastOp sends the encoder's
/// output to all stages, and each stage stores the keys and values of its own layers.
struct Program {
  DType dtype = DType::kFloat32;  // of the packed weights, and of the KV cache unless it is int8
  std::int64_t vocab_size = 0;
  std::int32_t num_layers = 0;  // of the body
  /// Number of the encoder's layers; 0: no encoder. Adapters number them after the body's layers; they count
  /// the layers of the whole model.
  std::int32_t num_encoder_layers = 0;
  std::int32_t max_batch_size = 0;
  std::int32_t max_num_tokens = 0;
  std::int32_t max_input_len = 0;
  std::int32_t max_seq_len = 0;
  std::int32_t max_beam_width = 1;
  std::int32_t max_encoder_input_len = 0;  // at most max_num_tokens, because inputs are never split
  std::int32_t tokens_per_block = 0;
  /// Layout of all matrices. With kRows, they are row-major, for the CUDA kernels: `dtype` is float16 or
  /// bfloat16, and matrices are plain or of integers. matrix_storage.h in src/program has the details.
  MatrixLayout matrix_layout = MatrixLayout::kPanels;
  /// True: keys and values are stored as int8 with one scale per token and key-value head, not as `dtype`.
  bool int8_kv_cache = false;
  /// Number of ranks that run one network together, each with its own program; see ShardedEngine.
  std::int32_t num_ranks = 1;
  /// Number of pipeline stages; each has num_ranks / num_stages consecutive ranks.
  std::int32_t num_stages = 1;
  /// Number of this rank.
  std::int32_t rank = 0;
  std::size_t arena_bytes = 0;
  std::vector<Buffer> buffers;
  std::vector<Op> encoder;
  std::vector<Op> body;
  std::vector<Op> head;
  /// float32, kLogits, logits_width(); kNoBuffer: there is no lm_head, only `hidden`. The last stage has
  /// both.
  BufferId logits = kNoBuffer;
  /// Activation type, kLogits: output of the final norm. kNoBuffer: not available.
  BufferId hidden = kNoBuffer;
  BufferId encoder_output = kNoBuffer;  // float32 or the activation type, kEncoderTokens
  LoraLayout lora;
  /// Digest of everything that results depend on, including weights, kernels and libraries. Two programs with
  /// the same identity give the same bits. Empty: unknown.
  std::string identity = {};
  /// The file from which weights are mapped; it is checked after each step. null: weights are in memory.
  std::shared_ptr<MappedFile> mapped_file = nullptr;

  /// Type of the activations that linear layers read.
  [[nodiscard]] DType activation_type() const {
    return matrix_layout == MatrixLayout::kRows ? dtype : activation_dtype(dtype);
  }
  /// Type of the outputs that linear layers store without an activation, except the logits.
  [[nodiscard]] DType stored_type() const {
    return matrix_layout == MatrixLayout::kRows ? dtype : DType::kFloat32;
  }
  [[nodiscard]] bool has_encoder() const { return !encoder.empty(); }
  /// At least 1, even if the sizes are not valid.
  [[nodiscard]] std::int32_t ranks_per_stage() const {
    return std::max(1, num_ranks / std::max(1, num_stages));
  }
  [[nodiscard]] std::int32_t stage() const { return rank / ranks_per_stage(); }
  [[nodiscard]] bool is_last_stage() const { return stage() == num_stages - 1; }
  [[nodiscard]] std::int64_t logits_width() const { return vocab_size + lora.max_extra_tokens; }
  /// Sections, in the order in which they run.
  [[nodiscard]] std::array<const std::vector<Op>*, 3> sections() const { return {&encoder, &body, &head}; }
  [[nodiscard]] const LoraSite& lora_site(std::int32_t index) const {
    return lora.sites[static_cast<std::size_t>(index)];
  }

  /// Number of ops of the head up to the norm that writes `hidden`; all of them if no norm does.
  [[nodiscard]] std::size_t num_ops_to_hidden() const;
  /// Returns every inconsistency: buffer ids and widths, overlapping buffers, sizes of weights, sites.
  [[nodiscard]] Problems validate() const;
};

}  // namespace adaptrt
