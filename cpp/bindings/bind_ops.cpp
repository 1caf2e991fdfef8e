#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "adaptrt/program/program.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_ops(py::module_& module) {
  py::class_<Buffer>(module, "Buffer", "An activation in the arena.")
      .def(py::init([](std::string name, DType dtype, RowKind rows, std::int64_t width, std::size_t offset) {
             return Buffer{std::move(name), dtype, rows, width, offset};
           }),
           py::kw_only(), py::arg("name"), py::arg("dtype"), py::arg("rows"), py::arg("width"),
           py::arg("offset"))
      .def_readonly("name", &Buffer::name)
      .def_readonly("dtype", &Buffer::dtype)
      .def_readonly("rows", &Buffer::rows)
      .def_readonly("width", &Buffer::width)
      .def_readonly("offset", &Buffer::offset);
  py::class_<EmbeddingOp>(
      module, "EmbeddingOp",
      "output[T, hidden] = table[token_ids] * scale + types[token_types] + positions[positions].")
      .def(py::init([](const PanelMatrix& table, BufferId output, float scale, const PanelMatrix& positions,
                       const PanelMatrix& types, std::int32_t lora_site) {
             return EmbeddingOp{table, output, scale, positions, types, lora_site};
           }),
           py::kw_only(), py::arg("table"), py::arg("output"), py::arg("scale") = 1.0F,
           py::arg("positions") = PanelMatrix{}, py::arg("types") = PanelMatrix{}, py::arg("lora_site") = -1)
      .def_readonly("lora_site", &EmbeddingOp::lora_site)
      .def_readonly("table", &EmbeddingOp::table)
      .def_readonly("scale", &EmbeddingOp::scale)
      .def_readonly("positions", &EmbeddingOp::positions)
      .def_readonly("types", &EmbeddingOp::types)
      .def_readonly("output", &EmbeddingOp::output);
  py::class_<LayerNormOp>(module, "LayerNormOp", "output = (input - mean) / deviation * weight + bias.")
      .def(py::init([](BufferId input, BufferId output, VectorView weight, VectorView bias, float epsilon,
                       bool gather_logit_rows, std::int32_t lora_site) {
             return LayerNormOp{input, output, weight, bias, epsilon, gather_logit_rows, lora_site};
           }),
           py::kw_only(), py::arg("input"), py::arg("output"), py::arg("weight"),
           py::arg("bias") = VectorView{}, py::arg("epsilon"), py::arg("gather_logit_rows") = false,
           py::arg("lora_site") = -1)
      .def_readonly("input", &LayerNormOp::input)
      .def_readonly("output", &LayerNormOp::output)
      .def_readonly("weight", &LayerNormOp::weight)
      .def_readonly("bias", &LayerNormOp::bias)
      .def_readonly("epsilon", &LayerNormOp::epsilon)
      .def_readonly("gather_logit_rows", &LayerNormOp::gather_logit_rows)
      .def_readonly("lora_site", &LayerNormOp::lora_site);
  py::class_<CastOp>(module, "CastOp", "output = input in the engine's activation type.")
      .def(py::init([](BufferId input, BufferId output) { return CastOp{input, output}; }), py::kw_only(),
           py::arg("input"), py::arg("output"))
      .def_readonly("input", &CastOp::input)
      .def_readonly("output", &CastOp::output);
  py::class_<RmsNormOp>(module, "RmsNormOp", "output = input / rms(input) * weight, or added to it.")
      .def(py::init(
               [](BufferId input, BufferId output, VectorView weight, float epsilon, bool gather_logit_rows,
                  bool add) { return RmsNormOp{input, output, weight, epsilon, gather_logit_rows, add}; }),
           py::kw_only(), py::arg("input"), py::arg("output"), py::arg("weight"), py::arg("epsilon"),
           py::arg("gather_logit_rows") = false, py::arg("add") = false)
      .def_readonly("add", &RmsNormOp::add)
      .def_readonly("input", &RmsNormOp::input)
      .def_readonly("output", &RmsNormOp::output)
      .def_readonly("weight", &RmsNormOp::weight)
      .def_readonly("epsilon", &RmsNormOp::epsilon)
      .def_readonly("gather_logit_rows", &RmsNormOp::gather_logit_rows);
  py::class_<RopeTableOp>(module, "RopeTableOp",
                          "cosine and sine [T, rotary_dim / 2] of the step's positions.")
      .def(
          py::init([](RopeKind kind, VectorView inverse_frequencies, float attention_scaling, float base,
                      float factor, std::int32_t original_max_position, BufferId cosine, BufferId sine,
                      VectorView long_inverse_frequencies) {
            return RopeTableOp{
                kind, inverse_frequencies,     attention_scaling, base, factor, original_max_position, cosine,
                sine, long_inverse_frequencies};
          }),
          py::kw_only(), py::arg("kind") = RopeKind::kStatic, py::arg("inverse_frequencies"),
          py::arg("attention_scaling") = 1.0F, py::arg("base") = 10000.0F, py::arg("factor") = 1.0F,
          py::arg("original_max_position") = 0, py::arg("cosine"), py::arg("sine"),
          py::arg("long_inverse_frequencies") = VectorView{})
      .def_readonly("long_inverse_frequencies", &RopeTableOp::long_inverse_frequencies)
      .def_readonly("kind", &RopeTableOp::kind)
      .def_readonly("inverse_frequencies", &RopeTableOp::inverse_frequencies)
      .def_readonly("attention_scaling", &RopeTableOp::attention_scaling)
      .def_readonly("base", &RopeTableOp::base)
      .def_readonly("factor", &RopeTableOp::factor)
      .def_readonly("original_max_position", &RopeTableOp::original_max_position)
      .def_readonly("cosine", &RopeTableOp::cosine)
      .def_readonly("sine", &RopeTableOp::sine);
  py::class_<AttentionShape>(module, "AttentionShape", "The heads of one layer's attention.")
      .def(py::init(
               [](std::int64_t num_attention_heads, std::int64_t num_key_value_heads, std::int64_t head_dim) {
                 return AttentionShape{num_attention_heads, num_key_value_heads, head_dim};
               }),
           py::kw_only(), py::arg("num_attention_heads"), py::arg("num_key_value_heads"), py::arg("head_dim"))
      .def_readonly("num_attention_heads", &AttentionShape::num_attention_heads)
      .def_readonly("num_key_value_heads", &AttentionShape::num_key_value_heads)
      .def_readonly("head_dim", &AttentionShape::head_dim);
  py::class_<AttentionOp>(module, "AttentionOp",
                          "Head norms, RoPE, and attention over the keys that its kind says.")
      .def(py::init([](AttentionKind kind, std::int32_t layer, const AttentionShape& shape, BufferId qkv,
                       BufferId cosine, BufferId sine, BufferId output, VectorView query_norm,
                       VectorView key_norm, float norm_epsilon, float scale, std::int32_t sliding_window,
                       float softcap, bool interleaved, VectorView position_bias, VectorView sinks) {
             return AttentionOp{kind,    layer,       shape,         qkv,          cosine, sine,
                                output,  query_norm,  key_norm,      norm_epsilon, scale,  sliding_window,
                                softcap, interleaved, position_bias, sinks};
           }),
           py::kw_only(), py::arg("kind") = AttentionKind::kCausal, py::arg("layer"), py::arg("shape"),
           py::arg("qkv"), py::arg("cosine"), py::arg("sine"), py::arg("output"),
           py::arg("query_norm") = VectorView{}, py::arg("key_norm") = VectorView{},
           py::arg("norm_epsilon") = 0.0F, py::arg("scale"), py::arg("sliding_window") = 0,
           py::arg("softcap") = 0.0F, py::arg("interleaved") = false, py::arg("position_bias") = VectorView{},
           py::arg("sinks") = VectorView{})
      .def_readonly("kind", &AttentionOp::kind)
      .def_readonly("position_bias", &AttentionOp::position_bias)
      .def_readonly("sinks", &AttentionOp::sinks)
      .def_readonly("softcap", &AttentionOp::softcap)
      .def_readonly("interleaved", &AttentionOp::interleaved)
      .def_readonly("layer", &AttentionOp::layer)
      .def_readonly("shape", &AttentionOp::shape)
      .def_readonly("qkv", &AttentionOp::qkv)
      .def_readonly("cosine", &AttentionOp::cosine)
      .def_readonly("sine", &AttentionOp::sine)
      .def_readonly("output", &AttentionOp::output)
      .def_readonly("query_norm", &AttentionOp::query_norm)
      .def_readonly("key_norm", &AttentionOp::key_norm)
      .def_readonly("norm_epsilon", &AttentionOp::norm_epsilon)
      .def_readonly("scale", &AttentionOp::scale)
      .def_readonly("sliding_window", &AttentionOp::sliding_window);
  py::class_<KeepLogitRowsOp>(module, "KeepLogitRowsOp",
                              "From here on the body has the step's logit rows for rows.")
      .def(py::init([](std::vector<BufferId> buffers) { return KeepLogitRowsOp{std::move(buffers)}; }),
           py::kw_only(), py::arg("buffers"))
      .def_readonly("buffers", &KeepLogitRowsOp::buffers);
  py::class_<LinearPart>(module, "LinearPart", "One weight of a fused linear layer.")
      .def(py::init([](const PanelMatrix& weight, VectorView bias) { return LinearPart{weight, bias}; }),
           py::kw_only(), py::arg("weight"), py::arg("bias") = VectorView{})
      .def_readonly("weight", &LinearPart::weight)
      .def_readonly("bias", &LinearPart::bias);
  py::class_<LinearOp>(module, "LinearOp",
                       "y = (input W^T + B A input) * magnitude + shift + bias, part by part.")
      .def(
          py::init([](BufferId input, BufferId output, LinearEpilogue epilogue, std::vector<LinearPart> parts,
                      std::int32_t lora_site, float scale, float softcap, float threshold,
                      bool has_sparse_input, BufferId scores, float least_score, NeuronTable neurons) {
            return LinearOp{
                input,   output,    epilogue,         std::move(parts), lora_site,   scale,
                softcap, threshold, has_sparse_input, scores,           least_score, std::move(neurons)};
          }),
          py::kw_only(), py::arg("input"), py::arg("output"), py::arg("epilogue") = LinearEpilogue::kStore,
          py::arg("parts"), py::arg("lora_site") = -1, py::arg("scale") = 1.0F, py::arg("softcap") = 0.0F,
          py::arg("threshold") = 0.0F, py::arg("has_sparse_input") = false, py::arg("scores") = kNoBuffer,
          py::arg("least_score") = 0.0F, py::arg("neurons") = NeuronTable{})
      .def_readonly("neurons", &LinearOp::neurons)
      .def_readonly("scores", &LinearOp::scores)
      .def_readonly("least_score", &LinearOp::least_score)
      .def_readonly("threshold", &LinearOp::threshold)
      .def_readonly("has_sparse_input", &LinearOp::has_sparse_input)
      .def_readonly("scale", &LinearOp::scale)
      .def_readonly("softcap", &LinearOp::softcap)
      .def_readonly("input", &LinearOp::input)
      .def_readonly("output", &LinearOp::output)
      .def_readonly("epilogue", &LinearOp::epilogue)
      .def_readonly("parts", &LinearOp::parts)
      .def_readonly("lora_site", &LinearOp::lora_site);
  py::class_<Routing>(module, "Routing", "How a token's experts are chosen and weighted.")
      .def(py::init([](RouterScores scores, std::int32_t top_k, std::int32_t num_groups,
                       std::int32_t groups_taken, bool normalised, float scale, VectorView bias) {
             return Routing{scores, top_k, num_groups, groups_taken, normalised, scale, bias};
           }),
           py::kw_only(), py::arg("scores"), py::arg("top_k"), py::arg("num_groups") = 1,
           py::arg("groups_taken") = 1, py::arg("normalised"), py::arg("scale") = 1.0F,
           py::arg("bias") = VectorView{})
      .def_readonly("scores", &Routing::scores)
      .def_readonly("top_k", &Routing::top_k)
      .def_readonly("num_groups", &Routing::num_groups)
      .def_readonly("groups_taken", &Routing::groups_taken)
      .def_readonly("normalised", &Routing::normalised)
      .def_readonly("scale", &Routing::scale)
      .def_readonly("bias", &Routing::bias);
  py::class_<ExpertsOp>(module, "ExpertsOp",
                        "output += the weighted sum of what a token's experts make of the input.")
      .def(py::init([](BufferId input, BufferId router_logits, BufferId output, const Routing& routing,
                       LinearEpilogue activation, std::vector<LinearPart> gate_up,
                       std::vector<LinearPart> down, std::int32_t gate_up_site, std::int32_t down_site,
                       bool stores, std::int32_t first_expert, std::int32_t experts_elsewhere) {
             return ExpertsOp{.input = input,
                              .router_logits = router_logits,
                              .output = output,
                              .routing = routing,
                              .stores = stores,
                              .activation = activation,
                              .gate_up = std::move(gate_up),
                              .down = std::move(down),
                              .gate_up_site = gate_up_site,
                              .down_site = down_site,
                              .first_expert = first_expert,
                              .experts_elsewhere = experts_elsewhere};
           }),
           py::kw_only(), py::arg("input"), py::arg("router_logits"), py::arg("output"), py::arg("routing"),
           py::arg("activation"), py::arg("gate_up"), py::arg("down"), py::arg("gate_up_site") = -1,
           py::arg("down_site") = -1, py::arg("stores") = false, py::arg("first_expert") = 0,
           py::arg("experts_elsewhere") = 0)
      .def_readonly("first_expert", &ExpertsOp::first_expert)
      .def_readonly("experts_elsewhere", &ExpertsOp::experts_elsewhere)
      .def_readonly("input", &ExpertsOp::input)
      .def_readonly("router_logits", &ExpertsOp::router_logits)
      .def_readonly("output", &ExpertsOp::output)
      .def_readonly("routing", &ExpertsOp::routing)
      .def_readonly("activation", &ExpertsOp::activation)
      .def_readonly("gate_up", &ExpertsOp::gate_up)
      .def_readonly("down", &ExpertsOp::down)
      .def_readonly("gate_up_site", &ExpertsOp::gate_up_site)
      .def_readonly("down_site", &ExpertsOp::down_site)
      .def_readonly("stores", &ExpertsOp::stores);
  py::class_<CrossKeysOp>(module, "CrossKeysOp", "Keeps [k | v] of encoder inputs for cross attention.")
      .def(py::init([](std::int32_t layer, const AttentionShape& shape, BufferId kv) {
             return CrossKeysOp{layer, shape, kv};
           }),
           py::kw_only(), py::arg("layer"), py::arg("shape"), py::arg("kv"))
      .def_readonly("layer", &CrossKeysOp::layer)
      .def_readonly("shape", &CrossKeysOp::shape)
      .def_readonly("kv", &CrossKeysOp::kv);
  py::class_<CrossAttentionOp>(module, "CrossAttentionOp", "Attention to a sequence's encoder input.")
      .def(py::init([](std::int32_t layer, const AttentionShape& shape, BufferId q, BufferId output,
                       float scale) { return CrossAttentionOp{layer, shape, q, output, scale}; }),
           py::kw_only(), py::arg("layer"), py::arg("shape"), py::arg("q"), py::arg("output"),
           py::arg("scale"))
      .def_readonly("layer", &CrossAttentionOp::layer)
      .def_readonly("shape", &CrossAttentionOp::shape)
      .def_readonly("q", &CrossAttentionOp::q)
      .def_readonly("output", &CrossAttentionOp::output)
      .def_readonly("scale", &CrossAttentionOp::scale);
  py::class_<AllReduceOp>(module, "AllReduceOp", "output = the sum of all ranks' inputs, or is added to.")
      .def(
          py::init([](BufferId input, BufferId output, bool add) { return AllReduceOp{input, output, add}; }),
          py::kw_only(), py::arg("input"), py::arg("output"), py::arg("add"))
      .def_readonly("input", &AllReduceOp::input)
      .def_readonly("output", &AllReduceOp::output)
      .def_readonly("add", &AllReduceOp::add);
  py::class_<AllHeadsNormOp>(module, "AllHeadsNormOp",
                             "RMS norms of all heads of q together, and of k's, of which ranks have some.")
      .def(
          py::init([](BufferId qkv, VectorView query_norm, VectorView key_norm, std::int64_t whole_query_size,
                      std::int64_t whole_key_size, bool counts_keys, float epsilon) {
            return AllHeadsNormOp{.qkv = qkv,
                                  .query_norm = query_norm,
                                  .key_norm = key_norm,
                                  .whole_query_size = whole_query_size,
                                  .whole_key_size = whole_key_size,
                                  .counts_keys = counts_keys,
                                  .epsilon = epsilon};
          }),
          py::kw_only(), py::arg("qkv"), py::arg("query_norm"), py::arg("key_norm"),
          py::arg("whole_query_size"), py::arg("whole_key_size"), py::arg("counts_keys"), py::arg("epsilon"))
      .def_readonly("qkv", &AllHeadsNormOp::qkv)
      .def_readonly("query_norm", &AllHeadsNormOp::query_norm)
      .def_readonly("key_norm", &AllHeadsNormOp::key_norm)
      .def_readonly("whole_query_size", &AllHeadsNormOp::whole_query_size)
      .def_readonly("whole_key_size", &AllHeadsNormOp::whole_key_size)
      .def_readonly("counts_keys", &AllHeadsNormOp::counts_keys)
      .def_readonly("epsilon", &AllHeadsNormOp::epsilon);
  py::class_<GatherOp>(module, "GatherOp", "output = the columns of all ranks' inputs, on the first.")
      .def(py::init([](BufferId input, BufferId output) { return GatherOp{input, output}; }), py::kw_only(),
           py::arg("input"), py::arg("output"))
      .def_readonly("input", &GatherOp::input)
      .def_readonly("output", &GatherOp::output);
  py::class_<ReceiveOp>(module, "ReceiveOp",
                        "output = what the stage of a pipeline before this one has sent.")
      .def(py::init([](BufferId output) { return ReceiveOp{output}; }), py::kw_only(), py::arg("output"))
      .def_readonly("output", &ReceiveOp::output);
  py::class_<SendOp>(module, "SendOp", "Sends the input to the next stage of a pipeline.")
      .def(py::init([](BufferId input) { return SendOp{input}; }), py::kw_only(), py::arg("input"))
      .def_readonly("input", &SendOp::input);
  py::class_<BroadcastOp>(module, "BroadcastOp",
                          "The ranks of all stages get what the last stage's have in the buffer.")
      .def(py::init([](BufferId buffer) { return BroadcastOp{buffer}; }), py::kw_only(), py::arg("buffer"))
      .def_readonly("buffer", &BroadcastOp::buffer);
  py::class_<GatedAddOp>(module, "GatedAddOp", "output += sigmoid(gate) * input.")
      .def(py::init([](BufferId input, BufferId gate, BufferId output) {
             return GatedAddOp{input, gate, output};
           }),
           py::kw_only(), py::arg("input"), py::arg("gate"), py::arg("output"))
      .def_readonly("input", &GatedAddOp::input)
      .def_readonly("gate", &GatedAddOp::gate)
      .def_readonly("output", &GatedAddOp::output);
}

}  // namespace adaptrt::bindings
