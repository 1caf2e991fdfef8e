#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <optional>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/program_fields.h"
#include "bind_struct.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

void bind_op_enums(py::module_& module) {
  py::native_enum<RowKind>(module, "RowKind", "enum.Enum", "Number of rows of a buffer in a step.")
      .value("TOKENS", RowKind::kTokens)
      .value("LOGITS", RowKind::kLogits)
      .value("ENCODER_TOKENS", RowKind::kEncoderTokens)
      .finalize();
  py::native_enum<RopeKind>(module, "RopeKind", "enum.Enum", "Computation of rotary angles from positions.")
      .value("STATIC", RopeKind::kStatic)
      .value("DYNAMIC", RopeKind::kDynamic)
      .value("LONG", RopeKind::kLong)
      .finalize();
  py::native_enum<LinearEpilogue>(module, "LinearEpilogue", "enum.Enum",
                                  "Last operation of a linear op on its result.")
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
      .value("RELU_SQUARED", LinearEpilogue::kReluSquared)
      .finalize();
  py::native_enum<AttentionKind>(module, "AttentionKind", "enum.Enum",
                                 "Keys that the queries of an attention op see.")
      .value("CAUSAL", AttentionKind::kCausal)
      .value("BIDIRECTIONAL", AttentionKind::kBidirectional)
      .finalize();
  py::native_enum<RouterScores>(module, "RouterScores", "enum.Enum",
                                "Function of a router's logits that gives the experts' scores.")
      .value("SOFTMAX", RouterScores::kSoftmax)
      .value("SIGMOID", RouterScores::kSigmoid)
      .value("SOFTMAX_OF_CHOSEN", RouterScores::kSoftmaxOfChosen)
      .finalize();
}

void bind_program_struct(py::module_& module) {
  bind_record<Program>(module, "Program", "A compiled network: ops in order, buffers in one arena, limits.")
      .def(
          "kv_block_bytes",
          [](Program program, std::optional<bool> int8_kv_cache) {
            program.int8_kv_cache = int8_kv_cache.value_or(program.int8_kv_cache);
            return kv_block_bytes(program);
          },
          py::arg("int8_kv_cache") = py::none(),
          "Bytes of a KV block over all layers; 0: the program has no KV blocks. int8_kv_cache: if given, "
          "compute the bytes for this setting instead of the program's.")
      .def(
          "validate", [](const Program& program) { return program.validate().list(); },
          "Returns everything that is inconsistent; [] if the program can run.");
  module.def("activation_dtype", &activation_dtype, py::arg("weights"),
             "Type of the activations that a linear op reads, for weights of this type.");
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
