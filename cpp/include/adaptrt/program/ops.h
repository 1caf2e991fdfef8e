#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/neuron_table.h"
#include "adaptrt/core/panels.h"

namespace adaptrt {

/// Index into Program::buffers.
using BufferId = std::int32_t;
inline constexpr BufferId kNoBuffer = -1;

/// How many rows a buffer has in a step.
enum class RowKind : std::uint8_t {
  kTokens,         ///< one a token of the step; at most max_num_tokens
  kLogits,         ///< one a row of logits in a slice; at most max_batch_size (see Engine::step)
  kEncoderTokens,  ///< one a token of the step's encoder inputs; at most max_num_tokens
};

/// Type of the packed GEMM's activations: bfloat16 for bfloat16 weights, float32 for float32 and float16
/// weights.
[[nodiscard]] constexpr DType activation_dtype(DType weights) {
  return weights == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
}

/// A one-dimensional weight, float32 whatever the engine's type: norm weights, biases, inverse frequencies.
struct VectorView {
  const float* data = nullptr;
  std::int64_t size = 0;
  /// Keeps `data` alive; null where somebody else does.
  std::shared_ptr<const void> owner = nullptr;
};

/// output[T, hidden] = table[token_ids[T]] * scale + positions[positions[T]]. The table is a panel matrix
/// [vocab, hidden], so that a tied lm_head shares its bytes. With an adapter, in place of the table's row:
/// (row + B A[:, token]) * magnitude + shift. Of a token beyond the vocabulary the row is the one that the
/// adapter brings. What StepInput::prompt_embeddings brings takes the place of the row and its scale.
struct EmbeddingOp {
  PanelMatrix table;
  BufferId output = kNoBuffer;  // float32, kTokens
  float scale = 1.0F;
  /// [positions, hidden] of learned positions; no rows where there are none.
  PanelMatrix positions = {};
  /// [types, hidden]: an embedding for each type of token; no rows if there is one type.
  PanelMatrix types = {};
  /// Index into LoraLayout::sites of the first slice of the vocabulary, or -1 where adapters do not act.
  std::int32_t lora_site = -1;
};

/// output = input / sqrt(mean(input^2) + epsilon) * weight, the mean over the width in float32.
/// With gather_logit_rows, output row i is made of the input's row of logit row i of the slice.
struct RmsNormOp {
  BufferId input = kNoBuffer;   // float32, kTokens
  BufferId output = kNoBuffer;  // the engine's activation type (see activation_dtype)
  VectorView weight;
  float epsilon = 0.0F;
  bool gather_logit_rows = false;
  /// True: the result is added to the output, which is float32 then. Used for a norm after a sublayer.
  bool add = false;
};

/// output = (input - mean) / sqrt(variance + epsilon) * weight + bias, over the width in float32. An
/// adapter's shift is added to the bias.
struct LayerNormOp {
  BufferId input = kNoBuffer;   // float32, kTokens
  BufferId output = kNoBuffer;  // the engine's activation type, or float32: a residual stream
  VectorView weight;
  VectorView bias;  // or empty
  float epsilon = 0.0F;
  bool gather_logit_rows = false;
  /// Index into LoraLayout::sites, or -1 where adapters do not act; there is a bias where they do.
  std::int32_t lora_site = -1;
};

/// output = input in the engine's activation type, for linear layers that read values without a norm.
struct CastOp {
  BufferId input = kNoBuffer;   // float32
  BufferId output = kNoBuffer;  // the engine's activation type
};

/// How the positions' rotary angles are made. See docs/formats.md for the formulas.
enum class RopeKind : std::uint8_t {
  kStatic,   ///< angle = position * inverse_frequency
  kDynamic,  ///< Hugging Face's "dynamic": the base grows with max(prompt length, position + 1)
  kLong,     ///< Hugging Face's "longrope": other frequencies where that is above original_max_position
};

/// cos/sin[T, rotary_dim / 2] of this step's positions, once for all layers. Angles are products of float32,
/// as in the reference implementation; both outputs are multiplied by attention_scaling. Rows of an adapter
/// that divides positions (DeviceAdapter::rotary_factor) have inverse frequencies that are divided by as
/// much.
struct RopeTableOp {
  RopeKind kind = RopeKind::kStatic;
  VectorView
      inverse_frequencies;  // [rotary_dim / 2]; for kDynamic those of lengths up to original_max_position
  float attention_scaling = 1.0F;
  // kDynamic only
  float base = 10000.0F;
  float factor = 1.0F;
  std::int32_t original_max_position = 0;
  BufferId cosine = kNoBuffer;  // float32, kTokens, rotary_dim / 2
  BufferId sine = kNoBuffer;    // float32, kTokens, rotary_dim / 2
  /// kLong only: [rotary_dim / 2] of lengths above original_max_position.
  VectorView long_inverse_frequencies = {};
};

/// The heads of one layer's attention.
struct AttentionShape {
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;

  [[nodiscard]] std::int64_t query_size() const { return num_attention_heads * head_dim; }
  [[nodiscard]] std::int64_t key_value_size() const { return num_key_value_heads * head_dim; }
  bool operator==(const AttentionShape&) const = default;
};

/// Keys that the queries of an attention op attend to.
enum class AttentionKind : std::uint8_t {
  kCausal,         ///< those of the sequence's KV blocks, up to their own
  kBidirectional,  ///< those of the sequence's rows in this step, before and behind; KV blocks have no part
};

/// RoPE on q and k, optional RMS norm of each q and k head before it, or of all of q's and k's heads
/// together, then attention, with grouped queries, after k and v were written to where its kind has them.
struct AttentionOp {
  AttentionKind kind = AttentionKind::kCausal;
  std::int32_t layer = 0;
  AttentionShape shape;
  BufferId qkv = kNoBuffer;  // float32, kTokens, query_size + 2 key_value_size: [q | k | v]
  BufferId cosine = kNoBuffer;
  BufferId sine = kNoBuffer;
  BufferId output = kNoBuffer;  // activation type, kTokens, query_size
  VectorView query_norm;        // [head_dim], [query_size] or empty
  VectorView key_norm;          // [head_dim], [key_value_size] or empty
  float norm_epsilon = 0.0F;
  float scale = 0.0F;  // of the scores, 1 / sqrt(head_dim) as a rule
  /// A token attends to itself and to the sliding_window - 1 tokens before it, and to as many after it if it
  /// attends to later tokens at all; 0: to all tokens.
  std::int32_t sliding_window = 0;
  /// Scores s become softcap * tanh(s / softcap); 0: they stay as they are.
  float softcap = 0.0F;
  /// True: elements 2 i and 2 i + 1 of a head rotate together, instead of i and i + rotary_dim / 2. Then
  /// heads have no norms of their own.
  bool interleaved = false;
  /// [heads, 2 r + 1] or empty: a bias for the scores, at r + (the key's position - the query's); distances
  /// beyond r use the value for r.
  VectorView position_bias = {};
  /// [num_attention_heads] or empty: of each head a score more, which counts in the sum that probabilities
  /// are divided by and has no value.
  VectorView sinks = {};
};

/// Keeps the keys and values of whole encoder inputs, for the cross attention of a decoder layer.
struct CrossKeysOp {
  std::int32_t layer = 0;  // of the decoder
  AttentionShape shape;
  BufferId kv = kNoBuffer;  // float32, kEncoderTokens, 2 key_value_size: [k | v]
};

/// Attention to all of the sequence's encoder input, whose keys and values a CrossKeysOp of the layer has
/// kept; grouped queries.
struct CrossAttentionOp {
  std::int32_t layer = 0;
  AttentionShape shape;
  BufferId q = kNoBuffer;       // float32, kTokens, query_size
  BufferId output = kNoBuffer;  // activation type, kTokens, query_size
  float scale = 0.0F;           // of the scores
};

/// One weight of a fused linear layer; its outputs follow the part before it.
struct LinearPart {
  PanelMatrix weight;
  VectorView bias;  // [n] or empty; added after the adapter's magnitude and shift
};

enum class LinearEpilogue : std::uint8_t {
  kStore,    ///< output[:, all parts] = y
  kAdd,      ///< output += y (float32 residual)
  kSiluMul,  ///< two parts of equal width, [gated; linear]: output = silu(y0) * y1
  kGeluMul,
  kGeluTanhMul,
  kGelu,  ///< output = gelu(y)
  kGeluTanh,
  kRelu,
  kReluMul,         ///< output = y0 * y1, and +0 where y0 is at most the threshold
  kReluMulRelu,     ///< the same with relu(y1)
  kClampedSiluMul,  ///< output = g sigmoid(1.702 g) (l + 1), g = min(y0, 7) and l = y1 from -7 to 7
};

inline constexpr LinearEpilogue kLastLinearEpilogue = LinearEpilogue::kClampedSiluMul;

/// True if the gate is a ReLU.
[[nodiscard]] constexpr bool is_relu_gated(LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kReluMul || epilogue == LinearEpilogue::kReluMulRelu;
}

/// True if the activation is a ReLU, with or without a second part.
[[nodiscard]] constexpr bool has_relu(LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kRelu || is_relu_gated(epilogue);
}

/// True if an op has two parts, one of which is activated.
[[nodiscard]] constexpr bool is_gated(LinearEpilogue epilogue) {
  switch (epilogue) {
    case LinearEpilogue::kStore:
    case LinearEpilogue::kAdd:
    case LinearEpilogue::kGelu:
    case LinearEpilogue::kGeluTanh:
    case LinearEpilogue::kRelu:
      return false;
    case LinearEpilogue::kSiluMul:
    case LinearEpilogue::kGeluMul:
    case LinearEpilogue::kGeluTanhMul:
    case LinearEpilogue::kReluMul:
    case LinearEpilogue::kReluMulRelu:
    case LinearEpilogue::kClampedSiluMul:
      return true;
  }
  return false;
}

/// True if there is an activation; its output has the activation type.
[[nodiscard]] constexpr bool is_activated(LinearEpilogue epilogue) {
  return epilogue >= LinearEpilogue::kSiluMul;
}

/// y = ((input W^T + adapter's B A input) * adapter's magnitude + adapter's shift + bias) * scale, for each
/// part. The output of lm_head, the logits, has LoraLayout::max_extra_tokens more columns for tokens beyond
/// the vocabulary. Columns of tokens that a row's adapter brings are computed; the others are not written.
struct LinearOp {
  BufferId input = kNoBuffer;   // activation type
  BufferId output = kNoBuffer;  // float32, or the activation type behind an activation
  LinearEpilogue epilogue = LinearEpilogue::kStore;
  std::vector<LinearPart> parts;
  /// Index into LoraLayout::sites, or -1 where adapters do not act. The site's parts are these parts; lm_head
  /// has one, and its slices of the vocabulary follow one another.
  std::int32_t lora_site = -1;
  float scale = 1.0F;
  /// y becomes softcap * tanh(y / softcap); 0: it stays as it is.
  float softcap = 0.0F;
  /// For ReLU gates, at least 0. If y1's weight has rows, a few rows of input read only those of its outputs
  /// whose gates are open.
  float threshold = 0.0F;
  /// True if most of the input is zero, after a ReLU: a few rows read only the weights of the other inputs,
  /// with the same bits.
  bool has_sparse_input = false;
  /// For ReLUs, with or without adapters or a second part: a row's gate is closed if the row's score is below
  /// least_score, whatever the gate's value. float32, as wide as the gate. If the gate's weight has rows, a
  /// few rows of input read only those of its outputs that the score of some row leaves open.
  BufferId scores = kNoBuffer;
  float least_score = 0.0F;
  /// For ReLU gates without scores, and for the layer that reads their output, which has the same value:
  /// their neurons one by one. A few rows of input read the gated layer's second part here instead of its
  /// rows.
  NeuronTable neurons = {};
};

/// Function that is applied to a router's logits before experts are chosen.
enum class RouterScores : std::uint8_t {
  kSoftmax,          ///< of all experts
  kSigmoid,          ///< of each
  kSoftmaxOfChosen,  ///< logits choose; the softmax is of the chosen ones'
};

/// How a token's experts are chosen, and with which weights their outputs are summed.
///
/// Experts stand in num_groups equal groups. Those of topk_groups groups compete: the groups whose two
/// best experts (with one expert a group, whose best) have the largest sum of scores + bias; then the top_k
/// largest scores + bias are chosen, of equal ones the expert with the smaller number. An expert's weight is
/// its score, without the bias, divided by the sum of the chosen ones if norm_topk_prob is true, times scale.
struct Routing {
  RouterScores scores = RouterScores::kSoftmax;
  std::int32_t top_k = 1;
  std::int32_t num_groups = 1;
  std::int32_t topk_groups = 1;
  bool norm_topk_prob = false;
  float scale = 1.0F;
  VectorView bias = {};  ///< [experts] or empty
};

/// output += (or, with `stores`, =) the sum over a token's experts, in the order of their numbers, of their
/// weights times down(activation(gate(x)) * up(x)). Adapters act on an expert's layers as they do on a
/// LinearOp's. Where ranks have different experts, the sum is over those of a token's that are here, and
/// every rank routes as if it had all.
struct ExpertsOp {
  BufferId input = kNoBuffer;          // activation type, kTokens
  BufferId router_logits = kNoBuffer;  // float32, kTokens, num_experts()
  BufferId output = kNoBuffer;         // float32, kTokens
  Routing routing;
  /// True: the result replaces the output instead of being added to it.
  bool stores = false;
  /// A gated one.
  LinearEpilogue activation = LinearEpilogue::kSiluMul;
  /// Gate and up of the first local expert, of the next one, and so on.
  std::vector<LinearPart> gate_up;
  std::vector<LinearPart> down;  // of each of them
  /// Indices into LoraLayout::sites for the first expert; those of the others follow. -1 if adapters do not
  /// apply.
  std::int32_t gate_up_site = -1;
  std::int32_t down_site = -1;
  /// The number of the first expert that is here, and how many other ranks have.
  std::int32_t first_expert = 0;
  std::int32_t num_remote_experts = 0;

  [[nodiscard]] std::int64_t num_experts_here() const { return static_cast<std::int64_t>(down.size()); }
  [[nodiscard]] std::int64_t num_experts() const { return num_experts_here() + num_remote_experts; }
};

/// output += sigmoid(gate) * input, row by row.
struct GatedAddOp {
  BufferId input = kNoBuffer;   // float32
  BufferId gate = kNoBuffer;    // float32, 1 wide
  BufferId output = kNoBuffer;  // float32
};

/// output = input_0 + input_1 + ..., in the order of the ranks of the stage, each of which has a term. Every
/// rank gets the same bits, independent of the rest of the step. The input is undefined afterwards.
struct AllReduceOp {
  BufferId input = kNoBuffer;   // float32
  BufferId output = kNoBuffer;  // float32
  /// The sum is added to the output: a residual stream.
  bool add = false;
};

/// RMS norms of all heads of q together, and of all of k, in place, where each rank of the stage has some of
/// the heads: the ranks' sums of squares are added in the order of the ranks.
struct AllHeadsNormOp {
  BufferId qkv = kNoBuffer;  // float32, kTokens: [q | k | v] of the heads that are here
  VectorView query_norm;     // those of q's elements that are here
  VectorView key_norm;       // and k's
  /// Number of elements of the whole q, and of k, for the means.
  std::int64_t whole_query_size = 0;
  std::int64_t whole_key_size = 0;
  /// True if the squares of k's heads are counted on this rank. If ranks share heads, one of them counts.
  bool counts_keys = true;
  float epsilon = 0.0F;
};

/// output = [input_0 | input_1 | ...] up to its width: the columns of each rank of the stage. Only the first
/// rank gets it; the outputs of the others are undefined.
struct GatherOp {
  BufferId input = kNoBuffer;   // float32, as wide on every rank
  BufferId output = kNoBuffer;  // float32
};

/// output = the values that the rank with the same share sent, in the stage before this one.
struct ReceiveOp {
  BufferId output = kNoBuffer;  // float32, kTokens or kEncoderTokens
};

/// Sends the input to the rank with the same share of the next stage.
struct SendOp {
  BufferId input = kNoBuffer;  // float32, kTokens or kEncoderTokens
};

/// The ranks of every stage get the values in `buffer` of the rank with the same share of the last stage: the
/// encoder's output, from which each stage computes the keys and values of its own layers. Ops before it
/// process a step's encoder inputs in pieces, ops after it process them as a whole; so they read no other
/// buffers from before.
struct BroadcastOp {
  BufferId buffer = kNoBuffer;  // Program::encoder_output
};

/// From this op on, the body has only the rows of the step whose logits or hidden states are requested, in
/// their order: row i of each of `buffers` becomes the i-th of them. Other buffers must be written before
/// they are read again. After the last attention, each row is independent, and of a prompt usually only the
/// last row is requested.
struct KeepLogitRowsOp {
  std::vector<BufferId> buffers;  // kTokens, each once
};

using Op = std::variant<EmbeddingOp, RopeTableOp, RmsNormOp, AttentionOp, LinearOp, KeepLogitRowsOp,
                        LayerNormOp, CastOp, ExpertsOp, GatedAddOp, CrossKeysOp, CrossAttentionOp,
                        AllReduceOp, GatherOp, ReceiveOp, SendOp, AllHeadsNormOp, BroadcastOp>;

}  // namespace adaptrt
