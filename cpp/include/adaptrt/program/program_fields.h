#pragma once

#include "adaptrt/core/fields.h"
#include "adaptrt/lora/layout_fields.h"
#include "adaptrt/program/ops.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

constexpr auto fields_of(const Buffer* /*type*/) {
  using C = Buffer;
  return FieldList{
      RequiredField{"name", &C::name, "Name in the engine file and in errors."},
      RequiredField{"dtype", &C::dtype, "Type of the elements."},
      RequiredField{"rows", &C::rows, "Meaning of a row."},
      RequiredField{"width", &C::width, "Elements of a row."},
      RequiredField{"offset", &C::offset, "Byte offset in the activation arena, a multiple of 64."}};
}
static_assert(lists_every_member<Buffer>());

constexpr auto fields_of(const EmbeddingOp* /*type*/) {
  using C = EmbeddingOp;
  return FieldList{
      RequiredField{"table", &C::table, "[vocab_size, hidden_size]."},
      RequiredField{"output", &C::output, "Buffer: float32, RowKind.TOKENS.", FieldRole::kBuffer},
      WrittenField{"scale", &C::scale, "Factor of the table's rows."},
      WrittenField{"positions", &C::positions, "[positions, hidden_size], added; no rows: there are none."},
      WrittenField{
          "lora_site", &C::lora_site,
          "Index into LoraLayout.sites of the first slice of the vocabulary; -1: adapters do not act."},
      Field{"types", &C::types, "[token types, hidden_size], added; no rows: there are none."},
      Field{"num_later_elements", &C::num_later_elements,
            "Number of elements of rows given in place of tokens that later ops add."},
      Field{"num_coordinates", &C::num_coordinates,
            "Number of coordinates at the end of rows given in place of tokens."}};
}
static_assert(lists_every_member<EmbeddingOp>());

constexpr auto fields_of(const AddGivenColumnsOp* /*type*/) {
  using C = AddGivenColumnsOp;
  return FieldList{
      RequiredField{"output", &C::output, "Buffer: float32, RowKind.TOKENS.", FieldRole::kBuffer},
      RequiredField{"first_column", &C::first_column,
                    "First of the added columns of rows given in place of tokens."}};
}
static_assert(lists_every_member<AddGivenColumnsOp>());

constexpr auto fields_of(const JoinNeighboursOp* /*type*/) {
  using C = JoinNeighboursOp;
  return FieldList{RequiredField{"input", &C::input, "Buffer: RowKind.TOKENS.", FieldRole::kBuffer},
                   RequiredField{"output", &C::output, "Buffer: of the input's type, `count` times as wide.",
                                 FieldRole::kBuffer},
                   RequiredField{"count", &C::count, "Number of rows that are joined."}};
}
static_assert(lists_every_member<JoinNeighboursOp>());

constexpr auto fields_of(const JoinColumnsOp* /*type*/) {
  using C = JoinColumnsOp;
  return FieldList{
      RequiredField{"inputs", &C::inputs, "Buffers: the engine's activation type.", FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type, RowKind.LOGITS.",
                    FieldRole::kBuffer}};
}
static_assert(lists_every_member<JoinColumnsOp>());

constexpr auto fields_of(const LayerNormOp* /*type*/) {
  using C = LayerNormOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: float32, RowKind.TOKENS.", FieldRole::kBuffer},
      RequiredField{"output", &C::output,
                    "Buffer: the engine's activation type, or float32 for a residual stream.",
                    FieldRole::kBuffer},
      RequiredField{"weight", &C::weight, "[width]."},
      WrittenField{"bias", &C::bias, "[width], or empty."},
      RequiredField{"epsilon", &C::epsilon, "Added to the variance."},
      WrittenField{"gather_logit_rows", &C::gather_logit_rows,
                   "True: output row i is made of the input's row of logit row i."},
      Field{"lora_site", &C::lora_site,
            "Index into LoraLayout.sites; -1: adapters do not act. A bias is there if they do."}};
}
static_assert(lists_every_member<LayerNormOp>());

constexpr auto fields_of(const CastOp* /*type*/) {
  using C = CastOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: float32.", FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type.", FieldRole::kBuffer}};
}
static_assert(lists_every_member<CastOp>());

constexpr auto fields_of(const RmsNormOp* /*type*/) {
  using C = RmsNormOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: float32, RowKind.TOKENS.", FieldRole::kBuffer},
      RequiredField{"output", &C::output,
                    "Buffer: the engine's activation type, or float32 if `add` and for a residual stream.",
                    FieldRole::kBuffer},
      RequiredField{"weight", &C::weight, "[width], or [elements of each of the row's groups]."},
      RequiredField{"epsilon", &C::epsilon, "Added to the mean of squares."},
      WrittenField{"gather_logit_rows", &C::gather_logit_rows,
                   "True: output row i is made of the input's row of logit row i."},
      WrittenField{"add", &C::add, "True: the result is added to the output."},
      Field{"sum_scale", &C::sum_scale, "[1] or empty: with `add`, the sum is multiplied by it."}};
}
static_assert(lists_every_member<RmsNormOp>());

constexpr auto fields_of(const RopeTableOp* /*type*/) {
  using C = RopeTableOp;
  return FieldList{
      WrittenField{"kind", &C::kind, "Computation of angles from positions."},
      RequiredField{"inverse_frequencies", &C::inverse_frequencies,
                    "[rotary_dim / 2]; for RopeKind.DYNAMIC those of lengths up to original_max_position."},
      WrittenField{"attention_scaling", &C::attention_scaling, "Factor of cosine and sine."},
      WrittenField{"base", &C::base, "RopeKind.DYNAMIC only."},
      WrittenField{"factor", &C::factor, "RopeKind.DYNAMIC only."},
      WrittenField{"original_max_position", &C::original_max_position,
                   "Positions of the model before they were extended."},
      RequiredField{"cosine", &C::cosine, "Buffer: float32, RowKind.TOKENS, rotary_dim / 2 wide.",
                    FieldRole::kBuffer},
      RequiredField{"sine", &C::sine, "Buffer: float32, RowKind.TOKENS, rotary_dim / 2 wide.",
                    FieldRole::kBuffer},
      WrittenField{"long_inverse_frequencies", &C::long_inverse_frequencies,
                   "RopeKind.LONG only: [rotary_dim / 2] of lengths above original_max_position."},
      Field{"columns", &C::columns,
            "[rotary_dim / 2] or empty: column with the position of each pair, in rows given in place of "
            "tokens."}};
}
static_assert(lists_every_member<RopeTableOp>());

constexpr auto fields_of(const AttentionShape* /*type*/) {
  using C = AttentionShape;
  return FieldList{
      RequiredField{"num_attention_heads", &C::num_attention_heads, "Heads of queries."},
      RequiredField{"num_key_value_heads", &C::num_key_value_heads, "Heads of keys, and of values."},
      RequiredField{"head_dim", &C::head_dim, "Elements of a head."},
      Field{"values_are_keys", &C::values_are_keys,
            "True: the only key-value head has its rotated keys as values."}};
}
static_assert(lists_every_member<AttentionShape>());

constexpr auto fields_of(const AttentionOp* /*type*/) {
  using C = AttentionOp;
  return FieldList{
      WrittenField{"kind", &C::kind, "Keys that a query sees."},
      RequiredField{"layer", &C::layer, "Number of the layer, whose KV blocks are used."},
      RequiredField{"shape", &C::shape, "Heads of the layer."},
      RequiredField{
          "qkv", &C::qkv,
          "Buffer: float32, RowKind.TOKENS; its first columns are [q | k | v]. There is no v if values "
          "are keys, and only q with shared_layer.",
          FieldRole::kBuffer},
      RequiredField{"cosine", &C::cosine, "Buffer that a RopeTableOp writes.", FieldRole::kBuffer},
      RequiredField{"sine", &C::sine, "Buffer that a RopeTableOp writes.", FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type, as wide as q.",
                    FieldRole::kBuffer},
      WrittenField{"query_norm", &C::query_norm, "[head_dim], [width of q] or empty."},
      WrittenField{"key_norm", &C::key_norm, "[head_dim], [width of k] or empty."},
      WrittenField{"norm_epsilon", &C::norm_epsilon, "Added to the mean of squares."},
      RequiredField{"scale", &C::scale, "Factor of the scores."},
      WrittenField{
          "sliding_window", &C::sliding_window,
          "A token sees itself and the sliding_window - 1 tokens before it (and after it, if it sees "
          "those); 0: all."},
      WrittenField{"softcap", &C::softcap, "Scores s become softcap * tanh(s / softcap); 0: they stay."},
      WrittenField{"interleaved", &C::interleaved,
                   "True: elements 2 i and 2 i + 1 of a head turn together, not those of its two halves."},
      WrittenField{
          "position_bias", &C::position_bias,
          "[heads, 2 r + 1] or empty: added to scores, at r + (position of the key - of the query)."},
      Field{"sinks", &C::sinks,
            "[heads] or empty: one more score per head, in the sum that probabilities are divided by."},
      Field{"norms_after_rotation", &C::norms_after_rotation,
            "True: heads are normalized after their rotation instead of before it."},
      Field{"query_scaling_beta", &C::query_scaling_beta,
            "Scores are multiplied by 1 + beta * ln(1 + floor((position of the query + offset) / length)); "
            "0: they stay."},
      Field{"query_scaling_length", &C::query_scaling_length, "See query_scaling_beta."},
      Field{"value_norm", &C::value_norm, "[head_dim] or empty: an RMS norm of each head of v."},
      Field{"values_from_keys", &C::values_from_keys, "True: v is k before its norm and its rotation."},
      Field{"shared_layer", &C::shared_layer,
            "An earlier layer whose keys and values are read; -1: the layer stores its own."},
      Field{"window_column", &C::window_column,
            "Column with the number of a row's window, in rows given in place of tokens; -1: there are no "
            "windows."},
      Field{"joint_column", &C::joint_column,
            "AttentionKind.CAUSAL only: column with a number, in rows given in place of tokens. Neighbours "
            "with equal numbers also attend to later ones; -1: there is none."},
      Field{"chunk", &C::chunk,
            "AttentionKind.CAUSAL only: tokens see only their chunk of so many positions; 0: there are no "
            "chunks."},
      Field{"query_scaling_offset", &C::query_scaling_offset, "See query_scaling_beta."}};
}
static_assert(lists_every_member<AttentionOp>());

constexpr auto fields_of(const KeepLogitRowsOp* /*type*/) {
  using C = KeepLogitRowsOp;
  return FieldList{
      RequiredField{"buffers", &C::buffers, "Buffers: RowKind.TOKENS, each once.", FieldRole::kBuffer}};
}
static_assert(lists_every_member<KeepLogitRowsOp>());

constexpr auto fields_of(const LinearPart* /*type*/) {
  using C = LinearPart;
  return FieldList{RequiredField{"weight", &C::weight, "W[outputs, inputs]."},
                   WrittenField{"bias", &C::bias, "[outputs] or empty; added after magnitude and shift."}};
}
static_assert(lists_every_member<LinearPart>());

constexpr auto fields_of(const LinearOp* /*type*/) {
  using C = LinearOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: the engine's activation type.", FieldRole::kBuffer},
      RequiredField{"output", &C::output,
                    "Buffer: float32, or the activation type if the epilogue has an activation.",
                    FieldRole::kBuffer},
      WrittenField{"epilogue", &C::epilogue, "Last operation on y."},
      RequiredField{"parts", &C::parts, "Weights, whose outputs follow one another."},
      WrittenField{"lora_site", &C::lora_site,
                   "Index into LoraLayout.sites, whose parts are these; -1: adapters do not act."},
      WrittenField{"scale", &C::scale, "Factor of y; in a gated layer, of the gate."},
      WrittenField{"softcap", &C::softcap, "y becomes softcap * tanh(y / softcap); 0: it stays."},
      Field{"threshold", &C::threshold, "Threshold of a ReLU gate, at least 0: values up to it count as 0."},
      Field{"has_sparse_input", &C::has_sparse_input,
            "True: most of the input is zero, and a few rows read only the weights of the others."},
      Field{"scores", &C::scores,
            "Buffer: float32, as wide as a ReLU's gate, which is closed where the score is below "
            "least_score; -1: there is none.",
            FieldRole::kBuffer},
      Field{"least_score", &C::least_score, "See scores."},
      Field{"neurons", &C::neurons,
            "Neurons of an MLP with a ReLU gate one by one, which a few rows read in place of weights."}};
}
static_assert(lists_every_member<LinearOp>());

constexpr auto fields_of(const Routing* /*type*/) {
  using C = Routing;
  return FieldList{
      RequiredField{"scores", &C::scores, "Function of the router's logits that gives scores."},
      RequiredField{"top_k", &C::top_k, "Experts of a token."},
      WrittenField{"num_groups", &C::num_groups, "Equal groups that experts stand in."},
      WrittenField{"topk_groups", &C::topk_groups, "Groups whose experts compete."},
      RequiredField{"norm_topk_prob", &C::norm_topk_prob,
                    "True: weights are divided by the sum of the chosen experts' scores."},
      WrittenField{"scale", &C::scale, "Factor of the weights."},
      WrittenField{"bias", &C::bias, "[experts] or empty: added to scores where experts are chosen."},
      Field{"rates_groups_by_best", &C::rates_groups_by_best,
            "True: a group is rated by its best expert. False: by its two best ones."},
      Field{"expert_scale", &C::expert_scale, "[experts] or empty: last factor of the weights."},
      Field{"scales_inputs", &C::scales_inputs,
            "True: weights multiply the experts' inputs instead of their outputs."}};
}
static_assert(lists_every_member<Routing>());

constexpr auto fields_of(const ExpertsOp* /*type*/) {
  using C = ExpertsOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: the engine's activation type, RowKind.TOKENS.",
                    FieldRole::kBuffer},
      RequiredField{"router_logits", &C::router_logits, "Buffer: float32, RowKind.TOKENS, one per expert.",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: float32, RowKind.TOKENS.", FieldRole::kBuffer},
      RequiredField{"routing", &C::routing, "Choice and weights of experts."},
      RequiredField{"activation", &C::activation, "A gated epilogue."},
      RequiredField{"gate_up", &C::gate_up, "Gate and up of each expert on this rank, in their order."},
      RequiredField{"down", &C::down, "Down of each expert on this rank, in their order."},
      WrittenField{"gate_up_site", &C::gate_up_site,
                   "Index into LoraLayout.sites of the first expert's gate and up; -1: adapters do not act."},
      WrittenField{"down_site", &C::down_site,
                   "Index into LoraLayout.sites of the first expert's down; -1: adapters do not act."},
      WrittenField{"stores", &C::stores, "True: the sum replaces the output. False: it is added."},
      Field{"first_expert", &C::first_expert, "Number of the first expert on this rank."},
      Field{"num_remote_experts", &C::num_remote_experts, "Number of experts that only other ranks have."}};
}
static_assert(lists_every_member<ExpertsOp>());

constexpr auto fields_of(const LatentShape* /*type*/) {
  using C = LatentShape;
  return FieldList{
      RequiredField{"num_heads", &C::num_heads, "Heads of queries."},
      RequiredField{"latent_dim", &C::latent_dim, "Elements of a compressed row."},
      RequiredField{"rotary_dim", &C::rotary_dim, "Elements of a key that are rotated."},
      RequiredField{"plain_dim", &C::plain_dim, "Elements of a head's query that are not rotated."},
      RequiredField{"value_dim", &C::value_dim, "Elements of a head's value."}};
}
static_assert(lists_every_member<LatentShape>());

constexpr auto fields_of(const LatentQueriesOp* /*type*/) {
  using C = LatentQueriesOp;
  return FieldList{
      RequiredField{"shape", &C::shape, "Sizes of the layer's attention."},
      RequiredField{"queries", &C::queries,
                    "Buffer: float32, RowKind.TOKENS: [plain | rotated] of each head.", FieldRole::kBuffer},
      RequiredField{"rows", &C::rows, "Buffer: float32, RowKind.TOKENS: [compressed row | rotated].",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: float32, RowKind.TOKENS: [q | k] of the attention.",
                    FieldRole::kBuffer},
      RequiredField{"norm", &C::norm, "[latent_dim]: weight of the compressed row's norm."},
      RequiredField{"epsilon", &C::epsilon, "Added to the mean of squares."},
      RequiredField{"keys", &C::keys, "[latent_dim, plain_dim] of each head."},
      WrittenField{"lora_site", &C::lora_site,
                   "Index into LoraLayout.sites of the first head's keys; -1: adapters do not act."}};
}
static_assert(lists_every_member<LatentQueriesOp>());

constexpr auto fields_of(const LatentValuesOp* /*type*/) {
  using C = LatentValuesOp;
  return FieldList{
      RequiredField{"shape", &C::shape, "Sizes of the layer's attention."},
      RequiredField{"input", &C::input,
                    "Buffer: the engine's activation type, RowKind.TOKENS: [rotated | latent] of each head.",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output,
                    "Buffer: the engine's activation type, RowKind.TOKENS, num_heads * value_dim wide.",
                    FieldRole::kBuffer},
      RequiredField{"values", &C::values, "[value_dim, latent_dim] of each head."},
      WrittenField{"lora_site", &C::lora_site,
                   "Index into LoraLayout.sites of the first head's values; -1: adapters do not act."}};
}
static_assert(lists_every_member<LatentValuesOp>());

constexpr auto fields_of(const CrossKeysOp* /*type*/) {
  using C = CrossKeysOp;
  return FieldList{
      RequiredField{"layer", &C::layer, "Number of the decoder's layer."},
      RequiredField{"shape", &C::shape, "Heads of the layer."},
      RequiredField{"kv", &C::kv, "Buffer: float32, RowKind.ENCODER_TOKENS, [k | v].", FieldRole::kBuffer}};
}
static_assert(lists_every_member<CrossKeysOp>());

constexpr auto fields_of(const CrossAttentionOp* /*type*/) {
  using C = CrossAttentionOp;
  return FieldList{RequiredField{"layer", &C::layer, "Number of the decoder's layer."},
                   RequiredField{"shape", &C::shape, "Heads of the layer."},
                   RequiredField{"q", &C::q, "Buffer: float32, RowKind.TOKENS.", FieldRole::kBuffer},
                   RequiredField{"output", &C::output, "Buffer: the engine's activation type, as wide as q.",
                                 FieldRole::kBuffer},
                   RequiredField{"scale", &C::scale, "Factor of the scores."}};
}
static_assert(lists_every_member<CrossAttentionOp>());

constexpr auto fields_of(const AllReduceOp* /*type*/) {
  using C = AllReduceOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: float32. The op may overwrite it.", FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: float32.", FieldRole::kBuffer},
      RequiredField{"add", &C::add, "True: the sum is added to the output. False: it replaces it."}};
}
static_assert(lists_every_member<AllReduceOp>());

constexpr auto fields_of(const AllHeadsNormOp* /*type*/) {
  using C = AllHeadsNormOp;
  return FieldList{
      RequiredField{"qkv", &C::qkv, "Buffer: float32, RowKind.TOKENS, [q | k | v] of this rank's heads.",
                    FieldRole::kBuffer},
      RequiredField{"query_norm", &C::query_norm, "[width of q on this rank]."},
      RequiredField{"key_norm", &C::key_norm, "[width of k on this rank]."},
      RequiredField{"whole_query_size", &C::whole_query_size, "Width of q on all ranks together."},
      RequiredField{"whole_key_size", &C::whole_key_size, "Width of k on all ranks together."},
      RequiredField{"counts_keys", &C::counts_keys,
                    "True if this rank adds the squares of its heads of k. Of ranks with the same heads, one "
                    "does."},
      RequiredField{"epsilon", &C::epsilon, "Added to the mean of squares."}};
}
static_assert(lists_every_member<AllHeadsNormOp>());

constexpr auto fields_of(const GatherOp* /*type*/) {
  using C = GatherOp;
  return FieldList{RequiredField{"input", &C::input, "Buffer: float32, of the same width on every rank.",
                                 FieldRole::kBuffer},
                   RequiredField{"output", &C::output, "Buffer: float32; only the first rank writes it.",
                                 FieldRole::kBuffer}};
}
static_assert(lists_every_member<GatherOp>());

constexpr auto fields_of(const ReceiveOp* /*type*/) {
  using C = ReceiveOp;
  return FieldList{RequiredField{"output", &C::output,
                                 "Buffer: float32, RowKind.TOKENS or RowKind.ENCODER_TOKENS.",
                                 FieldRole::kBuffer}};
}
static_assert(lists_every_member<ReceiveOp>());

constexpr auto fields_of(const SendOp* /*type*/) {
  using C = SendOp;
  return FieldList{RequiredField{
      "input", &C::input, "Buffer: float32, RowKind.TOKENS or RowKind.ENCODER_TOKENS.", FieldRole::kBuffer}};
}
static_assert(lists_every_member<SendOp>());

constexpr auto fields_of(const BroadcastOp* /*type*/) {
  using C = BroadcastOp;
  return FieldList{RequiredField{"buffer", &C::buffer, "Program.encoder_output.", FieldRole::kBuffer}};
}
static_assert(lists_every_member<BroadcastOp>());

constexpr auto fields_of(const SigmoidGateOp* /*type*/) {
  using C = SigmoidGateOp;
  return FieldList{
      RequiredField{"gate", &C::gate,
                    "Buffer: float32, at least as wide as the output; its last columns count.",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type.", FieldRole::kBuffer}};
}
static_assert(lists_every_member<SigmoidGateOp>());

constexpr auto fields_of(const XieluOp* /*type*/) {
  using C = XieluOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: float32.", FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type.", FieldRole::kBuffer},
      RequiredField{"parameters", &C::parameters, "[alpha_p, alpha_n, beta, epsilon]."}};
}
static_assert(lists_every_member<XieluOp>());

constexpr auto fields_of(const GatedColumnsOp* /*type*/) {
  using C = GatedColumnsOp;
  return FieldList{
      RequiredField{"gate", &C::gate, "Buffer: float32.", FieldRole::kBuffer},
      RequiredField{"values", &C::values, "Buffer: float32, whose columns are multiplied.",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type, as wide as the gate.",
                    FieldRole::kBuffer},
      RequiredField{"first_column", &C::first_column, "Number of the first of the values' columns."},
      RequiredField{"activation", &C::activation, "A gated epilogue without a threshold."}};
}
static_assert(lists_every_member<GatedColumnsOp>());

constexpr auto fields_of(const GatedRmsNormOp* /*type*/) {
  using C = GatedRmsNormOp;
  return FieldList{
      RequiredField{"input", &C::input, "Buffer: float32, whole heads.", FieldRole::kBuffer},
      RequiredField{"gate", &C::gate,
                    "Buffer: float32, at least as wide as the input; its last columns count.",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type.", FieldRole::kBuffer},
      RequiredField{"weight", &C::weight, "[elements of a head]."},
      RequiredField{"epsilon", &C::epsilon, "Added to the mean of squares of a group."},
      Field{"gate_first", &C::gate_first, "True: the gate multiplies the input before its norm."},
      Field{"num_groups", &C::num_groups, "Groups of a head; each is normalized by itself."},
      Field{"group_ranks", &C::group_ranks,
            "Number of consecutive ranks that have equal shares of a group. Above 1, a row is one share."}};
}
static_assert(lists_every_member<GatedRmsNormOp>());

constexpr auto fields_of(const CausalConvolutionOp* /*type*/) {
  using C = CausalConvolutionOp;
  return FieldList{
      RequiredField{"layer", &C::layer, "Number of the layer, whose state has the last taps - 1 inputs."},
      RequiredField{"values", &C::values, "Buffer: float32, RowKind.TOKENS; its first columns are replaced.",
                    FieldRole::kBuffer},
      RequiredField{"weight", &C::weight, "[taps, columns]."},
      RequiredField{"taps", &C::taps, "Number of tokens that an output depends on."},
      Field{"bias", &C::bias, "[columns] or empty."}};
}
static_assert(lists_every_member<CausalConvolutionOp>());

constexpr auto fields_of(const ScanShape* /*type*/) {
  using C = ScanShape;
  return FieldList{RequiredField{"num_heads", &C::num_heads, "Heads of x."},
                   RequiredField{"head_dim", &C::head_dim, "Elements of a head."},
                   RequiredField{"num_groups", &C::num_groups, "Groups of heads that share B and C."},
                   RequiredField{"state_dim", &C::state_dim, "Elements of a group's row of B, and of C."}};
}
static_assert(lists_every_member<ScanShape>());

constexpr auto fields_of(const SelectiveScanOp* /*type*/) {
  using C = SelectiveScanOp;
  return FieldList{
      RequiredField{"layer", &C::layer, "Number of the layer, whose state is [heads, state_dim, head_dim]."},
      RequiredField{"shape", &C::shape, "Heads of the layer."},
      RequiredField{"values", &C::values,
                    "Buffer: float32, RowKind.TOKENS; its first columns are [x | B | C | dt].",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: float32, RowKind.TOKENS, as wide as x.",
                    FieldRole::kBuffer},
      RequiredField{"log_decay", &C::log_decay, "[heads]: logarithm of the decay's rate."},
      RequiredField{"time_bias", &C::time_bias, "[heads]: added to dt."},
      RequiredField{"skip", &C::skip, "[heads]: factor of x that is added to the output."},
      Field{"time_min", &C::time_min, "Smallest time step."},
      Field{"time_max", &C::time_max, "Largest time step."}};
}
static_assert(lists_every_member<SelectiveScanOp>());

constexpr auto fields_of(const GatedConvolutionOp* /*type*/) {
  using C = GatedConvolutionOp;
  return FieldList{
      RequiredField{"layer", &C::layer, "Number of the layer, whose state has the last taps - 1 products."},
      RequiredField{"input", &C::input, "Buffer: float32, RowKind.TOKENS, [b | c | x].", FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: the engine's activation type, as wide as x.",
                    FieldRole::kBuffer},
      RequiredField{"weight", &C::weight, "[taps, columns]."},
      RequiredField{"taps", &C::taps, "Number of tokens that an output depends on."},
      Field{"bias", &C::bias, "[columns] or empty."}};
}
static_assert(lists_every_member<GatedConvolutionOp>());

constexpr auto fields_of(const DeltaShape* /*type*/) {
  using C = DeltaShape;
  return FieldList{
      RequiredField{"num_key_heads", &C::num_key_heads, "Heads of queries, and of keys."},
      RequiredField{"num_value_heads", &C::num_value_heads, "Heads of values, a multiple of num_key_heads."},
      RequiredField{"key_dim", &C::key_dim, "Elements of a head of queries or keys."},
      RequiredField{"value_dim", &C::value_dim, "Elements of a head of values."}};
}
static_assert(lists_every_member<DeltaShape>());

constexpr auto fields_of(const GatedDeltaOp* /*type*/) {
  using C = GatedDeltaOp;
  return FieldList{
      RequiredField{"layer", &C::layer,
                    "Number of the layer, whose state is [value heads, key_dim, value_dim]."},
      RequiredField{"shape", &C::shape, "Heads of the layer."},
      RequiredField{"qkv", &C::qkv, "Buffer: float32, RowKind.TOKENS; its first columns are [q | k | v].",
                    FieldRole::kBuffer},
      RequiredField{"gates", &C::gates,
                    "Buffer: float32, RowKind.TOKENS: [b | a], one of each per value head.",
                    FieldRole::kBuffer},
      RequiredField{"output", &C::output, "Buffer: float32, RowKind.TOKENS, as wide as v.",
                    FieldRole::kBuffer},
      RequiredField{"log_decay", &C::log_decay, "[value heads]: logarithm of the decay's rate."},
      RequiredField{"time_bias", &C::time_bias, "[value heads]: added to a."},
      Field{"update_scale", &C::update_scale, "Factor of sigmoid(b)."}};
}
static_assert(lists_every_member<GatedDeltaOp>());

constexpr auto fields_of(const GatedAddOp* /*type*/) {
  using C = GatedAddOp;
  return FieldList{RequiredField{"input", &C::input, "Buffer: float32.", FieldRole::kBuffer},
                   RequiredField{"gate", &C::gate, "Buffer: float32, 1 wide.", FieldRole::kBuffer},
                   RequiredField{"output", &C::output, "Buffer: float32.", FieldRole::kBuffer}};
}
static_assert(lists_every_member<GatedAddOp>());

constexpr auto fields_of(const Program* /*type*/) {
  using C = Program;
  return FieldList{
      RequiredField{"dtype", &C::dtype, "Type of packed weights, and of KV blocks unless int8_kv_cache."},
      RequiredField{"vocab_size", &C::vocab_size, "Tokens of the base model."},
      RequiredField{"num_layers", &C::num_layers, "Layers of the body."},
      WrittenField{"num_encoder_layers", &C::num_encoder_layers, "Layers of the encoder; 0: there is none."},
      RequiredField{"max_batch_size", &C::max_batch_size, "Largest number of sequences in a step."},
      RequiredField{"max_num_tokens", &C::max_num_tokens, "Largest number of tokens in a step."},
      RequiredField{"max_input_len", &C::max_input_len, "Largest number of tokens in a prompt."},
      RequiredField{"max_seq_len", &C::max_seq_len, "Largest number of tokens in a sequence."},
      WrittenField{"max_beam_width", &C::max_beam_width, "Largest beam width of a request."},
      WrittenField{"max_encoder_input_len", &C::max_encoder_input_len,
                   "Largest number of tokens in an encoder input, at most max_num_tokens."},
      RequiredField{"tokens_per_block", &C::tokens_per_block, "Tokens of a KV block."},
      Field{"matrix_layout", &C::matrix_layout,
            "Layout of all matrices: PANELS for CPUs, ROWS for NVIDIA GPUs."},
      WrittenField{"int8_kv_cache", &C::int8_kv_cache,
                   "True: keys and values are int8, with one scale per token and head."},
      WrittenField{"num_ranks", &C::num_ranks,
                   "Ranks that run the network together, each with its own program."},
      WrittenField{"num_stages", &C::num_stages,
                   "Stages of the pipeline, each with num_ranks / num_stages ranks."},
      WrittenField{"rank", &C::rank, "Number of this rank."},
      RequiredField{"arena_bytes", &C::arena_bytes, "Bytes of the activation arena."},
      RequiredField{"buffers", &C::buffers, "Activations; ops name them by index."},
      WrittenField{"encoder", &C::encoder, "Ops over the tokens of encoder inputs."},
      RequiredField{"body", &C::body, "Ops over the tokens of a step."},
      RequiredField{"head", &C::head, "Ops over a slice of the step's logit rows."},
      WrittenField{"logits", &C::logits, "Buffer: float32, RowKind.LOGITS; -1: there is no lm_head.",
                   FieldRole::kBuffer},
      WrittenField{"hidden", &C::hidden,
                   "Buffer: the engine's activation type, RowKind.LOGITS, after the final norm; -1: none.",
                   FieldRole::kBuffer},
      WrittenField{"encoder_output", &C::encoder_output, "Buffer: RowKind.ENCODER_TOKENS; -1: no encoder.",
                   FieldRole::kBuffer},
      WrittenField{"lora", &C::lora, "Adapters that the engine accepts."}};
}
/// All members except those that a process sets when it loads a program: identity and mapped_file.
static_assert(lists_every_member<Program, 2>());

}  // namespace adaptrt
