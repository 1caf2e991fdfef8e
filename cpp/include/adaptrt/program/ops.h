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

/// What the packed GEMM reads: bfloat16 for bfloat16 weights, float32 for float32 and float16 weights.
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
/// adapter brings. What StepInput::given_embeddings brings takes the place of the row and its scale.
struct EmbeddingOp {
  PanelMatrix table;
  BufferId output = kNoBuffer;  // float32, kTokens
  float scale = 1.0F;
  /// [positions, hidden] of learned positions; no rows where there are none.
  PanelMatrix positions = {};
  /// [types, hidden] of what kind of token each is; no rows where there is one kind.
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
  /// The result is added to the output, which is float32 then: a norm behind a sublayer.
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

/// output = input in the engine's activation type, for linear layers that read what is not normalised.
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

/// Which keys the queries of an attention op see.
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
  /// A token sees itself and the sliding_window - 1 tokens before it, and as many behind it where it sees
  /// those at all; 0: all of them.
  std::int32_t sliding_window = 0;
  /// Scores s become softcap * tanh(s / softcap); 0: they stay as they are.
  float softcap = 0.0F;
  /// Elements 2 i and 2 i + 1 of a head turn together, not i and i + rotary_dim / 2. Heads have no norm of
  /// their own then.
  bool interleaved = false;
  /// [heads, 2 r + 1] or empty: what is added to the scores, at r + (the key's position - the query's);
  /// beyond r it is what it is at r.
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

/// Whether the gate is a ReLU's.
[[nodiscard]] constexpr bool is_relu_gated(LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kReluMul || epilogue == LinearEpilogue::kReluMulRelu;
}

/// Whether the activation is a ReLU, of a gate or without one.
[[nodiscard]] constexpr bool has_relu(LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kRelu || is_relu_gated(epilogue);
}

/// Whether an op has two parts, of which one goes through an activation.
[[nodiscard]] constexpr bool is_gated(LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kSiluMul || epilogue == LinearEpilogue::kGeluMul ||
         epilogue == LinearEpilogue::kGeluTanhMul || epilogue == LinearEpilogue::kClampedSiluMul ||
         is_relu_gated(epilogue);
}

/// Whether there is an activation, behind which the output is of the activation type.
[[nodiscard]] constexpr bool is_activated(LinearEpilogue epilogue) {
  return epilogue >= LinearEpilogue::kSiluMul;
}

/// y = ((input W^T + adapter's B A input) * adapter's magnitude + adapter's shift + bias) * scale, part by
/// part. lm_head's, which the logits are, has behind it LoraLayout::max_extra_tokens columns for tokens
/// beyond the vocabulary: those that a row's adapter brings are made, the others are not written.
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
  /// Of ReLU gates, at least 0. Where y1's weight has rows, a few rows of input read those of its outputs
  /// alone whose gates are open.
  float threshold = 0.0F;
  /// Most of the input is zero behind a ReLU: a few rows read the weights of the others alone, to the same
  /// bits.
  bool has_sparse_input = false;
  /// Of ReLUs, with adapters or without, and with a second part or not: a row's gate is closed wherever the
  /// row's score is below least_score, whatever the gate would be. float32, as wide as the gate. Where the
  /// gate's weight has rows, a few rows of input read those of its outputs alone that some row's score
  /// leaves.
  BufferId scores = kNoBuffer;
  float least_score = 0.0F;
  /// Of ReLU gates without scores, and of the layer that reads what they make, which has the same: their
  /// neurons one by one. A few rows of input read the gated layer's second part here in place of its rows.
  NeuronTable neurons = {};
};

/// What a router's logits become before experts are chosen.
enum class RouterScores : std::uint8_t {
  kSoftmax,          ///< of all experts
  kSigmoid,          ///< of each
  kSoftmaxOfChosen,  ///< logits choose; the softmax is of the chosen ones'
};

/// How a token's experts are chosen, and with which weights their outputs are summed.
///
/// Experts stand in num_groups equal groups. Those of groups_taken groups compete: the groups whose two
/// best experts (with one expert a group, whose best) have the largest sum of scores + bias; then the top_k
/// largest scores + bias are chosen, of equal ones the expert with the smaller number. An expert's weight is
/// its score, without the bias, divided by the sum of the chosen ones where they are normalised, times scale.
struct Routing {
  RouterScores scores = RouterScores::kSoftmax;
  std::int32_t top_k = 1;
  std::int32_t num_groups = 1;
  std::int32_t groups_taken = 1;
  bool normalised = false;
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
  /// The output takes the sum's place, and is not added to.
  bool stores = false;
  /// A gated one.
  LinearEpilogue activation = LinearEpilogue::kSiluMul;
  /// Gate and up of the first expert that is here, those of the next, and so on.
  std::vector<LinearPart> gate_up;
  std::vector<LinearPart> down;  // of each of them
  /// Indices into LoraLayout::sites of the first one's, those of the others follow; -1 where adapters do not
  /// act.
  std::int32_t gate_up_site = -1;
  std::int32_t down_site = -1;
  /// The number of the first expert that is here, and how many other ranks have.
  std::int32_t first_expert = 0;
  std::int32_t experts_elsewhere = 0;

  [[nodiscard]] std::int64_t num_experts_here() const { return static_cast<std::int64_t>(down.size()); }
  [[nodiscard]] std::int64_t num_experts() const { return num_experts_here() + experts_elsewhere; }
};

/// output += sigmoid(gate) * input, row by row.
struct GatedAddOp {
  BufferId input = kNoBuffer;   // float32
  BufferId gate = kNoBuffer;    // float32, 1 wide
  BufferId output = kNoBuffer;  // float32
};

/// output = input_0 + input_1 + ..., in the order of the ranks: what each rank of the stage has of a sum.
/// Every rank gets the same bits, whatever else is in the step. What the input holds is used up: it must be
/// written before it is read again.
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
  /// Elements of all of q, and of k: what means are of.
  std::int64_t whole_query_size = 0;
  std::int64_t whole_key_size = 0;
  /// Whether the squares of k's heads are counted here. Of ranks that share heads, on one.
  bool counts_keys = true;
  float epsilon = 0.0F;
};

/// output = [input_0 | input_1 | ...] up to its width, the columns of each rank of the stage. On the first of
/// them alone; what the others' outputs hold is not said.
struct GatherOp {
  BufferId input = kNoBuffer;   // float32, as wide on every rank
  BufferId output = kNoBuffer;  // float32
};

/// output = what the rank with the same share of the stage before this one has sent.
struct ReceiveOp {
  BufferId output = kNoBuffer;  // float32, kTokens or kEncoderTokens
};

/// Sends the input to the rank with the same share of the next stage.
struct SendOp {
  BufferId input = kNoBuffer;  // float32, kTokens or kEncoderTokens
};

/// The ranks of every stage get what the rank with the same share of the last stage has in `buffer`: what the
/// encoder makes, of which each stage computes the keys and values of its own layers. Ops before it pass a
/// step's encoder inputs in pieces, those behind it as a whole, so that they read nothing else from before.
struct BroadcastOp {
  BufferId buffer = kNoBuffer;  // Program::encoder_output
};

/// From here on the body has those of the step's rows alone whose logits or hidden states are wanted, in
/// their order: row i of each of `buffers` becomes what the i-th of them was. Other buffers must be written
/// before they are read again. What comes after the last attention treats every row by itself, and of a
/// prompt only the last one is wanted as a rule.
struct KeepLogitRowsOp {
  std::vector<BufferId> buffers;  // kTokens, each once
};

using Op = std::variant<EmbeddingOp, RopeTableOp, RmsNormOp, AttentionOp, LinearOp, KeepLogitRowsOp,
                        LayerNormOp, CastOp, ExpertsOp, GatedAddOp, CrossKeysOp, CrossAttentionOp,
                        AllReduceOp, GatherOp, ReceiveOp, SendOp, AllHeadsNormOp, BroadcastOp>;

}  // namespace adaptrt
