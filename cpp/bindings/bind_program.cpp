#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/program.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

void bind_op_enums(py::module_& module) {
  py::native_enum<RowKind>(module, "RowKind", "enum.Enum", "How many rows a buffer has in a step.")
      .value("TOKENS", RowKind::kTokens)
      .value("LOGITS", RowKind::kLogits)
      .value("ENCODER_TOKENS", RowKind::kEncoderTokens)
      .finalize();
  py::native_enum<RopeKind>(module, "RopeKind", "enum.Enum",
                            "How the rotary angles of the positions are made.")
      .value("STATIC", RopeKind::kStatic)
      .value("DYNAMIC", RopeKind::kDynamic)
      .value("LONG", RopeKind::kLong)
      .finalize();
  py::native_enum<LinearEpilogue>(module, "LinearEpilogue", "enum.Enum",
                                  "What a linear op does with its result.")
      .value("STORE", LinearEpilogue::kStore)
      .value("ADD", LinearEpilogue::kAdd)
      .value("SILU_MUL", LinearEpilogue::kSiluMul)
      .value("GELU_MUL", LinearEpilogue::kGeluMul)
      .value("GELU_TANH_MUL", LinearEpilogue::kGeluTanhMul)
      .value("GELU", LinearEpilogue::kGelu)
      .value("GELU_TANH", LinearEpilogue::kGeluTanh)
      .value("RELU", LinearEpilogue::kRelu)
      .value("RELU_MUL", LinearEpilogue::kReluMul)
      .value("RELU_MUL_RELU", LinearEpilogue::kReluMulRelu)
      .value("CLAMPED_SILU_MUL", LinearEpilogue::kClampedSiluMul)
      .finalize();
  py::native_enum<AttentionKind>(module, "AttentionKind", "enum.Enum",
                                 "Which keys the queries of an attention op see.")
      .value("CAUSAL", AttentionKind::kCausal)
      .value("BIDIRECTIONAL", AttentionKind::kBidirectional)
      .finalize();
  py::native_enum<RouterScores>(module, "RouterScores", "enum.Enum",
                                "What a router's logits become before experts are chosen.")
      .value("SOFTMAX", RouterScores::kSoftmax)
      .value("SIGMOID", RouterScores::kSigmoid)
      .value("SOFTMAX_OF_CHOSEN", RouterScores::kSoftmaxOfChosen)
      .finalize();
}

void bind_program_struct(py::module_& module) {
  py::class_<Program>(module, "Program", "A compiled network: ops in order, buffers in one arena, limits.")
      .def(py::init([](DType dtype, std::int64_t vocab_size, std::int32_t num_layers,
                       std::int32_t num_encoder_layers, std::int32_t max_batch_size,
                       std::int32_t max_num_tokens, std::int32_t max_input_len, std::int32_t max_seq_len,
                       std::int32_t max_beam_width, std::int32_t max_encoder_input_len,
                       std::int32_t tokens_per_block, bool int8_kv_cache, std::size_t arena_bytes,
                       std::vector<Buffer> buffers, std::vector<Op> encoder, std::vector<Op> body,
                       std::vector<Op> head, BufferId logits, BufferId hidden, BufferId encoder_output,
                       LoraLayout lora, std::int32_t num_ranks, std::int32_t num_stages, std::int32_t rank) {
             return Program{.dtype = dtype,
                            .vocab_size = vocab_size,
                            .num_layers = num_layers,
                            .num_encoder_layers = num_encoder_layers,
                            .max_batch_size = max_batch_size,
                            .max_num_tokens = max_num_tokens,
                            .max_input_len = max_input_len,
                            .max_seq_len = max_seq_len,
                            .max_beam_width = max_beam_width,
                            .max_encoder_input_len = max_encoder_input_len,
                            .tokens_per_block = tokens_per_block,
                            .int8_kv_cache = int8_kv_cache,
                            .num_ranks = num_ranks,
                            .num_stages = num_stages,
                            .rank = rank,
                            .arena_bytes = arena_bytes,
                            .buffers = std::move(buffers),
                            .encoder = std::move(encoder),
                            .body = std::move(body),
                            .head = std::move(head),
                            .logits = logits,
                            .hidden = hidden,
                            .encoder_output = encoder_output,
                            .lora = std::move(lora)};
           }),
           py::kw_only(), py::arg("dtype"), py::arg("vocab_size"), py::arg("num_layers"),
           py::arg("num_encoder_layers") = 0, py::arg("max_batch_size"), py::arg("max_num_tokens"),
           py::arg("max_input_len"), py::arg("max_seq_len"), py::arg("max_beam_width") = 1,
           py::arg("max_encoder_input_len") = 0, py::arg("tokens_per_block"),
           py::arg("int8_kv_cache") = false, py::arg("arena_bytes"), py::arg("buffers"),
           py::arg("encoder") = std::vector<Op>{}, py::arg("body"), py::arg("head"),
           py::arg("logits") = kNoBuffer, py::arg("hidden") = kNoBuffer,
           py::arg("encoder_output") = kNoBuffer, py::arg("lora") = LoraLayout{}, py::arg("num_ranks") = 1,
           py::arg("num_stages") = 1, py::arg("rank") = 0)
      .def_readonly("num_ranks", &Program::num_ranks)
      .def_readonly("num_stages", &Program::num_stages)
      .def_readonly("rank", &Program::rank)
      .def_readonly("num_encoder_layers", &Program::num_encoder_layers)
      .def_readonly("max_encoder_input_len", &Program::max_encoder_input_len)
      .def_readonly("encoder", &Program::encoder)
      .def_readonly("encoder_output", &Program::encoder_output)
      .def_readonly("dtype", &Program::dtype)
      .def_readonly("vocab_size", &Program::vocab_size)
      .def_readonly("num_layers", &Program::num_layers)
      .def_readonly("max_batch_size", &Program::max_batch_size)
      .def_readonly("max_num_tokens", &Program::max_num_tokens)
      .def_readonly("max_input_len", &Program::max_input_len)
      .def_readonly("max_seq_len", &Program::max_seq_len)
      .def_readonly("max_beam_width", &Program::max_beam_width)
      .def_readonly("tokens_per_block", &Program::tokens_per_block)
      .def_readonly("int8_kv_cache", &Program::int8_kv_cache)
      .def_readonly("arena_bytes", &Program::arena_bytes)
      .def_readonly("buffers", &Program::buffers)
      .def_readonly("body", &Program::body)
      .def_readonly("head", &Program::head)
      .def_readonly("logits", &Program::logits)
      .def_readonly("hidden", &Program::hidden)
      .def_readonly("lora", &Program::lora)
      .def(
          "kv_block_bytes",
          [](Program program, std::optional<bool> int8_kv_cache) {
            program.int8_kv_cache = int8_kv_cache.value_or(program.int8_kv_cache);
            return kv_block_bytes(program);
          },
          py::arg("int8_kv_cache") = py::none(),
          "Bytes of a KV block over all layers; 0: there are none. With `int8_kv_cache`, what they would be "
          "with it or without it.")
      .def(
          "validate", [](const Program& program) { return program.validate().list(); },
          "Everything that is inconsistent; empty when the program can run.");
  module.def("activation_dtype", &activation_dtype, py::arg("weights"),
             "The type of the activations that a linear op reads, for weights of this type.");
}

}  // namespace

void bind_program(py::module_& module) {
  bind_weights(module);
  bind_lora_layout(module);
  bind_op_enums(module);
  bind_ops(module);
  bind_program_struct(module);
}

}  // namespace adaptrt::bindings
