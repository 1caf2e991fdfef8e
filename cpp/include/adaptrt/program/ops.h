#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <variant>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/neuron_table.h"
#include "adaptrt/core/panels.h"

namespace adaptrt {

/// Index into Program::buffers.
using BufferId = std::int32_t;
inline constexpr BufferId kNoBuffer = -1;

/// Number of rows that a buffer has in a step.
enum class RowKind : std::uint8_t {
  kTokens,         ///< one per token of the step; at most max_num_tokens
  kLogits,         ///< one per row of logits in a slice; at most max_batch_size (see Engine::step)
  kEncoderTokens,  ///< one per token of the step's encoder inputs; at most max_num_tokens
};

/// Type of the activations that packed GEMMs read: bfloat16 for bfloat16 weights, otherwise float32.
[[nodiscard]] constexpr DType activation_dtype(DType weights) {
  return weights == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
}

/// A one-dimensional weight: a norm's weight, a bias, inverse frequencies. It is float32 in every engine.
struct VectorView {
  const float* data = nullptr;
  std::int64_t size = 0;
  /// Keeps `data` alive; null if another object does.
  std::shared_ptr<const void> owner = nullptr;
};

/// output[T, hidden] = table[token_ids[T]] * scale + positions[positions[T]]. The table is a panel matrix
/// [vocab, hidden], so that a tied lm_head shares its bytes.
///
/// An adapter replaces the table's row by (row + B A[:, token]) * magnitude + shift. For a token beyond the
/// vocabulary, the adapter has the row. StepInput::prompt_embeddings replace table[token_ids[T]] * scale.
///
/// Each of these has hidden elements, then num_later_elements, which later ops add (AddGivenColumnsOp), then
/// num_coordinates. Coordinates are whole numbers: positions and windows of the row (RopeTableOp::columns,
/// AttentionOp::window_column), and last the rotary position of a text token that follows it. Negative: there
/// is none, so the token is treated as without coordinates.
struct EmbeddingOp {
  PanelMatrix table;
  BufferId output = kNoBuffer;  // float32, kTokens
  float scale = 1.0F;
  /// [positions, hidden], learned; no rows if the model has no learned positions.
  PanelMatrix positions = {};
  /// [types, hidden], an embedding for each token type; no rows if there is one type.
  PanelMatrix types = {};
  /// Index into LoraLayout::sites of the vocabulary's first slice; -1: adapters do not apply.
  std::int32_t lora_site = -1;
  std::int64_t num_later_elements = 0;
  std::int32_t num_coordinates = 0;

  /// Width of StepInput::prompt_embeddings.
  [[nodiscard]] std::int64_t given_size() const { return table.k + num_later_elements + num_coordinates; }
};

/// output[:] += the columns [first_column, first_column + width) of StepInput::prompt_embeddings, in rows
/// that have one.
struct AddGivenColumnsOp {
  BufferId output = kNoBuffer;  // float32, kTokens
  std::int64_t first_column = 0;
};

/// output = the columns of `count` neighbouring rows, one row after the other. Rows 0 to count - 1 of a
/// sequence are neighbours, then the next `count` rows, and so on; each of them gets the same output. Missing
/// neighbours after the end of a sequence are zeros.
struct JoinNeighboursOp {
  BufferId input = kNoBuffer;   // float32 or the activation type, kTokens
  BufferId output = kNoBuffer;  // the input's type, count times as wide
  std::int64_t count = 1;
};

/// output = the columns of all inputs, one after the other. Output row i is made of the input rows whose
/// hidden states are row i of the slice.
struct JoinColumnsOp {
  std::vector<BufferId> inputs;  // activation type, kTokens
  BufferId output = kNoBuffer;   // activation type, kLogits
};

/// output = input / sqrt(mean(input^2) + epsilon) * weight. The mean is over the width, in float32.
/// With gather_logit_rows, output row i is computed from the input row whose logits are row i of the slice.
///
/// If the weight has fewer elements than a row, it belongs to each of the row's equal groups, and each group
/// has its own mean.
struct RmsNormOp {
  BufferId input = kNoBuffer;  // float32, kTokens; with `add`, also the type of linear layers' stored outputs
  BufferId output =
      kNoBuffer;      // the engine's activation type (see activation_dtype), or float32 for a stream
  VectorView weight;  // [width], or [elements of a group]
  float epsilon = 0.0F;
  bool gather_logit_rows = false;
  /// True: the result is added to the output, which is then float32. Used for a norm after a sublayer.
  bool add = false;
  /// [1] or empty. With `add`, the sum is multiplied by it.
  VectorView sum_scale = {};
};

/// output = (input - mean) / sqrt(variance + epsilon) * weight + bias. Mean and variance are over the width,
/// in float32. An adapter's shift is added to the bias.
struct LayerNormOp {
  BufferId input = kNoBuffer;   // float32, kTokens
  BufferId output = kNoBuffer;  // the engine's activation type, or float32 for a residual stream
  VectorView weight;
  VectorView bias;  // or empty
  float epsilon = 0.0F;
  bool gather_logit_rows = false;
  /// Index into LoraLayout::sites; -1: adapters do not apply. If they apply, there is a bias.
  std::int32_t lora_site = -1;
};

/// output = input in the engine's activation type, for linear layers that read values without a norm.
struct CastOp {
  BufferId input = kNoBuffer;   // float32
  BufferId output = kNoBuffer;  // the engine's activation type
};

/// Method of computing rotary angles. See docs/formats.md for the formulas.
enum class RopeKind : std::uint8_t {
  kStatic,   ///< angle = position * inverse_frequency
  kDynamic,  ///< Hugging Face's "dynamic": the base grows with max(prompt length, position + 1)
  kLong,     ///< Hugging Face's "longrope": other frequencies if that maximum > original_max_position
};

/// Computes cos and sin [T, rotary_dim / 2] of the step's positions, once for all layers. Angles are float32
/// products, as in the reference implementation. Both outputs are multiplied by attention_scaling. For rows
/// whose adapter divides positions, inverse frequencies are divided by DeviceAdapter::rotary_factor.
struct RopeTableOp {
  RopeKind kind = RopeKind::kStatic;
  VectorView inverse_frequencies;  // [rotary_dim / 2]; kDynamic: used for lengths up to original_max_position
  float attention_scaling = 1.0F;
  // kDynamic only
  float base = 10000.0F;
  float factor = 1.0F;
  std::int32_t original_max_position = 0;
  BufferId cosine = kNoBuffer;  // float32, kTokens, rotary_dim / 2
  BufferId sine = kNoBuffer;    // float32, kTokens, rotary_dim / 2
  /// kLong only: [rotary_dim / 2], used for lengths above original_max_position.
  VectorView long_inverse_frequencies = {};
  /// [rotary_dim / 2] or empty: for rows of StepInput::prompt_embeddings, the column that has the position of
  /// each pair of elements.
  std::vector<std::int32_t> columns = {};
};

/// The heads of one layer's attention.
struct AttentionShape {
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  /// True: a rotated key is also its value, and is stored once. There is one key-value head then.
  bool values_are_keys = false;

  [[nodiscard]] std::int64_t query_size() const { return num_attention_heads * head_dim; }
  [[nodiscard]] std::int64_t key_value_size() const { return num_key_value_heads * head_dim; }
  /// Width of [q | k | v], or of [q | k] if values_are_keys.
  [[nodiscard]] std::int64_t qkv_size() const {
    return query_size() + (values_are_keys ? 1 : 2) * key_value_size();
  }
  bool operator==(const AttentionShape&) const = default;
};

/// Keys that the queries of an attention op attend to.
enum class AttentionKind : std::uint8_t {
  kCausal,         ///< keys in the sequence's KV blocks, up to the query's own
  kBidirectional,  ///< keys of all the sequence's rows in this step; KV blocks are not used
};

/// Attention with grouped queries. It optionally applies an RMS norm to q and k, to each head or to all heads
/// together. Then it applies RoPE to them, stores k and v where `kind` has its keys, and attends. With
/// norms_after_rotation, heads are rotated first.
///
/// The first columns of qkv are [q | k | v]; [q | k] if values are keys; only q if another layer has stored
/// keys.
struct AttentionOp {
  AttentionKind kind = AttentionKind::kCausal;
  std::int32_t layer = 0;
  AttentionShape shape;
  BufferId qkv = kNoBuffer;  // float32, kTokens, at least qkv_size()
  BufferId cosine = kNoBuffer;
  BufferId sine = kNoBuffer;
  BufferId output = kNoBuffer;  // activation type, kTokens, query_size
  VectorView query_norm;        // [head_dim], [query_size] or empty
  VectorView key_norm;          // [head_dim], [key_value_size] or empty
  float norm_epsilon = 0.0F;
  float scale = 0.0F;  // factor of the scores, usually 1 / sqrt(head_dim)
  /// A token attends to itself and to the sliding_window - 1 tokens before it, and with kBidirectional to as
  /// many after it. 0: no window.
  std::int32_t sliding_window = 0;
  /// Scores s become softcap * tanh(s / softcap); 0: scores do not change.
  float softcap = 0.0F;
  /// True: elements 2 i and 2 i + 1 of a head rotate together, instead of i and i + rotary_dim / 2. Norms of
  /// each head then come after the rotation, and have equal weights for all elements.
  bool interleaved = false;
  /// [heads, 2 r + 1] or empty. The element at r + (key position - query position) is added to the score;
  /// distances greater than r count as r.
  VectorView position_bias = {};
  /// [num_attention_heads] or empty: attention sinks. A head's sink is one more score in the softmax's
  /// denominator; no value belongs to it.
  VectorView sinks = {};
  /// True: heads are normalized after their rotation. There is no norm of all heads together then.
  bool norms_after_rotation = false;
  /// Scores of a query at position p are multiplied by 1 + query_scaling_beta *
  /// ln(1 + floor((p + query_scaling_offset) / query_scaling_length)); 0: they are not.
  float query_scaling_beta = 0.0F;
  std::int32_t query_scaling_length = 1;
  /// [head_dim] or empty: an RMS norm of each head of v, with norm_epsilon.
  VectorView value_norm = {};
  /// True: v is k before its norm and its rotation.
  bool values_from_keys = false;
  /// An earlier layer whose keys and values the queries attend to; the op stores none. -1: there is none.
  std::int32_t shared_layer = -1;
  /// kBidirectional only: column of StepInput::prompt_embeddings with the number of a row's window. A row
  /// attends only to its window, which is a run of neighbours with equal numbers. -1: there are no windows.
  std::int32_t window_column = -1;
  /// kCausal only: column of StepInput::prompt_embeddings with a number. Neighbours with equal numbers, such
  /// as the rows of an image, also attend to those of them that follow; a step has the rest of them. -1:
  /// there is none.
  std::int32_t joint_column = -1;
  /// kCausal only: sequences consist of chunks of so many positions, and tokens attend only to their own
  /// chunk. There is no sliding window then, and no joint_column. 0: there are no chunks.
  std::int32_t chunk = 0;
  std::int32_t query_scaling_offset = 0;

  /// Layer whose keys and values are read.
  [[nodiscard]] std::int32_t kv_layer() const { return shared_layer < 0 ? layer : shared_layer; }
  [[nodiscard]] std::int64_t qkv_size() const {
    if (shared_layer >= 0) return shape.query_size();
    return values_from_keys ? shape.query_size() + shape.key_value_size() : shape.qkv_size();
  }
};

/// Stores the keys and values of whole encoder inputs for the cross attention of a decoder layer.
struct CrossKeysOp {
  std::int32_t layer = 0;  // of the decoder
  AttentionShape shape;
  BufferId kv = kNoBuffer;  // float32, kEncoderTokens, 2 key_value_size: [k | v]
};

/// Attention with grouped queries to the sequence's whole encoder input. A CrossKeysOp of the same layer has
/// stored the keys and values.
struct CrossAttentionOp {
  std::int32_t layer = 0;
  AttentionShape shape;
  BufferId q = kNoBuffer;       // float32, kTokens, query_size
  BufferId output = kNoBuffer;  // activation type, kTokens, query_size
  float scale = 0.0F;           // factor of the scores
};

/// One weight of a fused linear layer. Its outputs follow those of the part before it.
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
  kReluMul,         ///< output = y0 * y1 if y0 > threshold, otherwise +0
  kReluMulRelu,     ///< the same with relu(y1)
  kClampedSiluMul,  ///< output = g sigmoid(1.702 g) (l + 1), g = min(y0, 7), l = y1 clamped to [-7, 7]
  kReluSquared,     ///< output = relu(y)^2
};

inline constexpr LinearEpilogue kLastLinearEpilogue = LinearEpilogue::kReluSquared;

/// True if the gate is a ReLU.
[[nodiscard]] constexpr bool is_relu_gated(LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kReluMul || epilogue == LinearEpilogue::kReluMulRelu;
}

/// True if the activation is a ReLU; the layer may be gated or not.
[[nodiscard]] constexpr bool has_relu(LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kRelu || is_relu_gated(epilogue);
}

/// True if an op has two parts and activates one of them.
[[nodiscard]] constexpr bool is_gated(LinearEpilogue epilogue) {
  switch (epilogue) {
    case LinearEpilogue::kStore:
    case LinearEpilogue::kAdd:
    case LinearEpilogue::kGelu:
    case LinearEpilogue::kGeluTanh:
    case LinearEpilogue::kRelu:
    case LinearEpilogue::kReluSquared:
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

/// True if there is an activation. The output then has the engine's activation type.
[[nodiscard]] constexpr bool is_activated(LinearEpilogue epilogue) {
  return epilogue >= LinearEpilogue::kSiluMul;
}

/// y = ((input W^T + adapter's B A input) * adapter's magnitude + adapter's shift + bias) * scale, for each
/// part; in a gated layer only the gate is multiplied by scale. lm_head's output, the logits, has
/// LoraLayout::max_extra_tokens more columns for tokens beyond the vocabulary. The op writes the columns of
/// the tokens that a row's adapter adds, not the other ones.
struct LinearOp {
  BufferId input = kNoBuffer;   // activation type
  BufferId output = kNoBuffer;  // float32, or the activation type after an activation
  LinearEpilogue epilogue = LinearEpilogue::kStore;
  std::vector<LinearPart> parts;
  /// Index into LoraLayout::sites; -1: adapters do not apply. The site's parts are these parts. lm_head has
  /// one part; the sites of its vocabulary slices follow one another.
  std::int32_t lora_site = -1;
  float scale = 1.0F;
  /// y becomes softcap * tanh(y / softcap); 0: y does not change.
  float softcap = 0.0F;
  /// For ReLU gates, at least 0. If y1's weight has rows (PanelMatrix::has_rows) and the input has few rows,
  /// the op reads only the weights of outputs whose gates are open.
  float threshold = 0.0F;
  /// True if most of the input is zero, as after a ReLU. If the input has few rows, the op reads only the
  /// weights of inputs that are not zero. The result has the same bits.
  bool has_sparse_input = false;
  /// For ReLUs, with or without adapters or a second part: float32, as wide as the gate. If a gate's score is
  /// below least_score, the gate is closed, whatever its value. If the gate's weight has rows and the input
  /// has few rows, the op reads only the weights of gates that are open by the score of at least one row.
  BufferId scores = kNoBuffer;
  float least_score = 0.0F;
  /// The neurons, stored one by one. For ReLU gates without scores, and for the layer that reads their output
  /// (both have the same table). If the input has few rows, the op reads the gated layer's second part here
  /// instead of in its rows.
  NeuronTable neurons = {};
};

/// Function that is applied to a router's logits before experts are chosen.
enum class RouterScores : std::uint8_t {
  kSoftmax,          ///< softmax over all experts
  kSigmoid,          ///< sigmoid of each logit
  kSoftmaxOfChosen,  ///< logits choose the experts; the softmax is over the chosen ones
};

/// Choice of a token's experts, and the weights with which their outputs are summed.
///
/// There are num_groups groups of equal size. First, the topk_groups best groups are chosen: a group is rated
/// by the sum of its two largest values of score + bias (of one value if it has one expert), or by its
/// largest value if rates_groups_by_best is true. Then the top_k experts of these groups with the largest
/// score + bias are chosen; of equal ones, the one with the smaller number. An expert's weight is scale times
/// its score without the bias. If norm_topk_prob is true, the score is divided by the sum of the chosen
/// experts' scores. Last, it is multiplied by the expert's element of expert_scale.
struct Routing {
  RouterScores scores = RouterScores::kSoftmax;
  std::int32_t top_k = 1;
  std::int32_t num_groups = 1;
  std::int32_t topk_groups = 1;
  bool norm_topk_prob = false;
  float scale = 1.0F;
  VectorView bias = {};  ///< [experts] or empty
  bool rates_groups_by_best = false;
  VectorView expert_scale = {};  ///< [experts] or empty
  /// True: an expert's input is multiplied by its weight, and its output is not.
  bool scales_inputs = false;
};

/// output += (or, with `stores`, =) the sum of weight * down(activation(gate(x)) * up(x)) over a token's
/// experts, in the order of their numbers. Adapters apply to an expert's layers as to a LinearOp. If ranks
/// have different experts, every rank routes among all experts, and sums over those that it has.
struct ExpertsOp {
  BufferId input = kNoBuffer;          // activation type, kTokens
  BufferId router_logits = kNoBuffer;  // float32, kTokens, num_experts()
  BufferId output = kNoBuffer;         // float32, kTokens
  Routing routing;
  /// True: the result replaces the output instead of being added to it.
  bool stores = false;
  /// A gated activation.
  LinearEpilogue activation = LinearEpilogue::kSiluMul;
  /// Gate and up of the first local expert, gate and up of the next one, and so on.
  std::vector<LinearPart> gate_up;
  std::vector<LinearPart> down;  // one per local expert
  /// Indices into LoraLayout::sites for the first expert; the sites of the others follow. -1: adapters do not
  /// apply.
  std::int32_t gate_up_site = -1;
  std::int32_t down_site = -1;
  /// Number of this rank's first expert, and the number of experts that only other ranks have.
  std::int32_t first_expert = 0;
  std::int32_t num_remote_experts = 0;

  [[nodiscard]] std::int64_t num_experts_here() const { return static_cast<std::int64_t>(down.size()); }
  [[nodiscard]] std::int64_t num_experts() const { return num_experts_here() + num_remote_experts; }
};

/// output += sigmoid(gate) * input, row by row.
struct GatedAddOp {
  BufferId input = kNoBuffer;   // the type of stored outputs of linear layers
  BufferId gate = kNoBuffer;    // float32, 1 wide
  BufferId output = kNoBuffer;  // float32
};

/// output = xIELU(input), element by element. With a = softplus(alpha_p) and n = beta + softplus(alpha_n):
///
///   a x^2 + beta x for x > 0, otherwise n (expm1(min(x, epsilon)) - x) + beta x
struct XieluOp {
  BufferId input = kNoBuffer;   // the type of stored outputs of linear layers
  BufferId output = kNoBuffer;  // activation type
  VectorView parameters;        // [alpha_p, alpha_n, beta, epsilon]
};

/// output = activation(gate) * the columns [first_column, first_column + the gate's width) of values.
struct GatedColumnsOp {
  BufferId gate = kNoBuffer;    // the type of stored outputs of linear layers
  BufferId values = kNoBuffer;  // float32
  BufferId output = kNoBuffer;  // activation type, as wide as the gate
  std::int64_t first_column = 0;
  /// An activation of gated layers without a threshold.
  LinearEpilogue activation = LinearEpilogue::kGeluTanhMul;
};

/// output *= sigmoid(the gate's last columns), row by row: a gate of attention.
struct SigmoidGateOp {
  BufferId gate = kNoBuffer;    // the type of stored outputs of linear layers, at least as wide as the output
  BufferId output = kNoBuffer;  // activation type
};

/// output = input / sqrt(mean(input^2) + epsilon) * weight * silu(the gate's last columns). The mean is over
/// each group of a head, in float32. With gate_first, the input is multiplied by silu(gate) before its norm
/// instead.
struct GatedRmsNormOp {
  BufferId input = kNoBuffer;   // float32, whole heads
  BufferId gate = kNoBuffer;    // float32, at least as wide as the input
  BufferId output = kNoBuffer;  // activation type
  VectorView weight;            // [elements of a head]
  float epsilon = 0.0F;
  bool gate_first = false;
  /// Number of equal groups that a head consists of.
  std::int64_t num_groups = 1;
  /// Number of consecutive ranks that have equal shares of a group. Above 1, a row is this rank's share of
  /// one group, and the ranks' sums of squares are added in the order of the ranks.
  std::int32_t group_ranks = 1;
};

/// A causal convolution of each of the first columns by itself, in place: x = silu(bias + the sum over taps i
/// of weight[i] * the input of taps - 1 - i tokens before). A sequence's state has the inputs of its last
/// taps - 1 tokens.
struct CausalConvolutionOp {
  std::int32_t layer = 0;
  BufferId values = kNoBuffer;  // float32, kTokens
  VectorView weight;            // [taps, columns]
  std::int64_t taps = 1;
  VectorView bias = {};  // [columns] or empty

  [[nodiscard]] std::int64_t width() const { return weight.size / taps; }
  /// Floats of a sequence's state.
  [[nodiscard]] std::int64_t state_size() const { return (taps - 1) * width(); }
};

/// A short convolution between two gates. Column by column, with the input's columns [b | c | x]:
///
///   output = c * (bias + the sum over taps i of weight[i] * (b * x) of taps - 1 - i tokens before)
///
/// A sequence's state has b * x of its last taps - 1 tokens.
struct GatedConvolutionOp {
  std::int32_t layer = 0;
  BufferId input = kNoBuffer;   // float32, kTokens, 3 width()
  BufferId output = kNoBuffer;  // activation type, kTokens, width()
  VectorView weight;            // [taps, columns]
  std::int64_t taps = 1;
  VectorView bias = {};  // [columns] or empty

  [[nodiscard]] std::int64_t width() const { return weight.size / taps; }
  /// Floats of a sequence's state.
  [[nodiscard]] std::int64_t state_size() const { return (taps - 1) * width(); }
};

/// The heads of one layer's gated delta rule. Consecutive value heads share a key head.
struct DeltaShape {
  std::int64_t num_key_heads = 0;
  std::int64_t num_value_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;

  [[nodiscard]] std::int64_t key_size() const { return num_key_heads * key_dim; }
  [[nodiscard]] std::int64_t value_size() const { return num_value_heads * value_dim; }
  /// Floats of a sequence's state: [value heads, key_dim, value_dim].
  [[nodiscard]] std::int64_t state_size() const { return key_dim * value_size(); }
  bool operator==(const DeltaShape&) const = default;
};

/// The gated delta rule, token by token in the order of positions. For each value head, with q and k divided
/// by their L2 norms, and q by sqrt(key_dim):
///
///   state = decay * state + k^T ((v - decay * k state) * sigmoid(b)),  output = q state
///
/// The decay is exp(-exp(log_decay) * softplus(a + time_bias)). A norm is sqrt(sum of squares + 1e-6).
/// sigmoid(b) is multiplied by update_scale.
struct GatedDeltaOp {
  std::int32_t layer = 0;
  DeltaShape shape;
  BufferId qkv = kNoBuffer;    // float32, kTokens; the first columns are [q | k | v], and the op changes q, k
  BufferId gates = kNoBuffer;  // float32, kTokens, 2 num_value_heads: [b | a]; the op changes them
  BufferId output = kNoBuffer;  // float32, kTokens, value_size
  VectorView log_decay;         // [num_value_heads]
  VectorView time_bias;         // [num_value_heads]
  float update_scale = 1.0F;
};

/// The heads of one layer's selective scan (Mamba 2). Consecutive heads share a group.
struct ScanShape {
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t num_groups = 0;
  /// Elements of a row of B, and of C, in a group.
  std::int64_t state_dim = 0;

  [[nodiscard]] std::int64_t value_size() const { return num_heads * head_dim; }
  [[nodiscard]] std::int64_t group_size() const { return num_groups * state_dim; }
  /// Floats of a sequence's state: [heads, state_dim, head_dim].
  [[nodiscard]] std::int64_t state_size() const { return value_size() * state_dim; }
  bool operator==(const ScanShape&) const = default;
};

/// Mamba 2's selective scan, token by token in the order of positions. For each head:
///
///   t = softplus(dt + time_bias), at least time_min and at most time_max
///   state = exp(-exp(log_decay) t) * state + B^T (x t),  output = C state + skip * x
struct SelectiveScanOp {
  std::int32_t layer = 0;
  ScanShape shape;
  BufferId values = kNoBuffer;  // float32, kTokens; its first columns are [x | B | C | dt]; the op changes dt
  BufferId output = kNoBuffer;  // float32, kTokens, value_size
  VectorView log_decay;         // [num_heads]
  VectorView time_bias;         // [num_heads]
  VectorView skip;              // [num_heads]
  float time_min = 0.0F;
  float time_max = std::numeric_limits<float>::max();
};

/// output = input_0 + input_1 + ..., with one term per rank of the stage, in the order of the ranks. Every
/// rank gets the same bits; they do not depend on the other rows. The input is undefined afterwards.
struct AllReduceOp {
  BufferId input = kNoBuffer;   // float32
  BufferId output = kNoBuffer;  // float32
  /// True: the sum is added to the output, a residual stream.
  bool add = false;
};

/// Normalizes all heads of q together, and all heads of k, in place (RMS norm). Each rank of the stage has
/// some of the heads; the ranks' sums of squares are added in the order of the ranks.
struct AllHeadsNormOp {
  BufferId qkv = kNoBuffer;  // float32, kTokens: [q | k | v] of this rank's heads
  VectorView query_norm;     // weights of this rank's elements of q
  VectorView key_norm;       // weights of this rank's elements of k
  /// Numbers of elements of q and k on all ranks together, for the means.
  std::int64_t whole_query_size = 0;
  std::int64_t whole_key_size = 0;
  /// True if this rank counts the squares of its heads of k. If ranks share heads, one of them counts.
  bool counts_keys = true;
  float epsilon = 0.0F;
};

/// output = [input_0 | input_1 | ...], cut to the output's width: the columns of all ranks of the stage. Only
/// the first rank gets it; the outputs of the others are undefined.
struct GatherOp {
  BufferId input = kNoBuffer;   // float32, equally wide on all ranks
  BufferId output = kNoBuffer;  // float32
};

/// output = the values that the rank with the same share in the previous stage sent.
struct ReceiveOp {
  BufferId output = kNoBuffer;  // float32, kTokens or kEncoderTokens
};

/// Sends the input to the rank with the same share in the next stage.
struct SendOp {
  BufferId input = kNoBuffer;  // float32, kTokens or kEncoderTokens
};

/// Sends `buffer`, the encoder's output, from the last stage to the ranks with the same share in all other
/// stages. Each stage computes the keys and values of its own layers from it. Ops before this one process a
/// step's encoder inputs in pieces; ops after it process them as a whole, so they read no other buffer that
/// was written before.
struct BroadcastOp {
  BufferId buffer = kNoBuffer;  // Program::encoder_output
};

/// Sizes of one layer's latent attention. All heads share a token's key, a compressed row. A head's own keys
/// and values would be products with that row.
struct LatentShape {
  std::int64_t num_heads = 0;
  std::int64_t latent_dim = 0;  ///< elements of a compressed row
  std::int64_t rotary_dim = 0;  ///< elements of a key that are rotated
  std::int64_t plain_dim = 0;   ///< elements of a head's query that are not rotated
  std::int64_t value_dim = 0;   ///< elements of a head's value

  /// Width of a key, and of each query after the product with the head's part of keys.
  [[nodiscard]] std::int64_t key_dim() const { return rotary_dim + latent_dim; }
  bool operator==(const LatentShape&) const = default;
};

/// Makes [q | k] for an AttentionOp whose values are keys; a head of it is [rotated | latent].
///
///   q of head h = [the rotated elements of its query | keys[h] times the others]
///   k = [the rotated elements | the compressed row / sqrt(mean of squares + epsilon) * norm]
///
/// keys[h] [latent_dim, plain_dim] turns the head's keys into a product with its query. So the cache needs
/// only compressed rows, and the bits do not depend on how a prompt is cut.
struct LatentQueriesOp {
  LatentShape shape;
  BufferId queries = kNoBuffer;  // Program::stored_type(), kTokens: [plain | rotated] of each head
  BufferId rows = kNoBuffer;     // stored_type(), kTokens: [compressed row | rotated]
  BufferId output = kNoBuffer;   // stored_type(), kTokens, (num_heads + 1) key_dim
  VectorView norm;               // [latent_dim]
  float epsilon = 0.0F;
  std::vector<LinearPart> keys;  // one per head
  /// Index into LoraLayout::sites for the first head; the sites of the others follow. -1: adapters do not
  /// apply.
  std::int32_t lora_site = -1;
};

/// output of head h = values[h] [value_dim, latent_dim] times the latent elements that the head attended to.
struct LatentValuesOp {
  LatentShape shape;
  BufferId input = kNoBuffer;      // activation type, kTokens: [rotated | latent] of each head
  BufferId output = kNoBuffer;     // activation type, kTokens, num_heads value_dim
  std::vector<LinearPart> values;  // one per head
  std::int32_t lora_site = -1;     // as in LatentQueriesOp
};

/// Drops the rows whose logits and hidden states are not requested: row i of each of `buffers` becomes the
/// i-th requested row, and later ops have only these rows. Other buffers must be written before they are read
/// again. This saves work after the last attention: rows are independent from there on, and usually only a
/// prompt's last row is requested.
struct KeepLogitRowsOp {
  std::vector<BufferId> buffers;  // kTokens, each once
};

using Op = std::variant<EmbeddingOp, RopeTableOp, RmsNormOp, AttentionOp, LinearOp, KeepLogitRowsOp,
                        LayerNormOp, CastOp, ExpertsOp, GatedAddOp, CrossKeysOp, CrossAttentionOp,
                        AllReduceOp, GatherOp, ReceiveOp, SendOp, AllHeadsNormOp, BroadcastOp, SigmoidGateOp,
                        GatedRmsNormOp, CausalConvolutionOp, GatedDeltaOp, GatedConvolutionOp,
                        SelectiveScanOp, XieluOp, LatentQueriesOp, LatentValuesOp, GatedColumnsOp,
                        AddGivenColumnsOp, JoinColumnsOp, JoinNeighboursOp>;

/// Name of an op's kind for messages: "rms norm".
[[nodiscard]] std::string_view name_of(const Op& op);

}  // namespace adaptrt
