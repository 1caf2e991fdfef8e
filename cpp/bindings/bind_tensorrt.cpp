#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/tensorrt/tensorrt_engine.h"
#include "bindings.h"
#include "engine_handle.h"
#include "kept_object.h"
#include "plan_context.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// A TensorRT engine made by Python.
class TensorRtEngine : public EngineHandle {
 public:
  TensorRtEngine(TensorRtProgram program, std::shared_ptr<Device> device, py::object prefill,
                 py::object decode, bool cuda_graphs) {
    TensorRtContexts contexts{.prefill = make_plan_context(std::move(prefill)),
                              .decode = make_plan_context(std::move(decode))};
    const py::gil_scoped_release release;
    hold(make_tensorrt_engine(std::move(program), std::move(device), std::move(contexts),
                              {.cuda_graphs = cuda_graphs}));
  }
};

TensorRtWeight make_weight(std::string name, const py::array& data, std::vector<std::int64_t> shape) {
  if ((data.flags() & py::array::c_style) == 0) {
    throw py::value_error("TensorRtWeight: " + name + " is not contiguous");
  }
  return {.name = std::move(name),
          .data = {static_cast<const std::byte*>(data.data()), static_cast<std::size_t>(data.nbytes())},
          .shape = std::move(shape),
          .owner = std::make_shared<KeptObject>(data)};
}

void bind_program_parts(py::module_& module) {
  py::class_<GpuStepLimits>(module, "TensorRtProfile", "Largest sizes of a step that runs in a profile.")
      .def(py::init([](std::int32_t max_tokens, std::int32_t max_sequences, std::int32_t max_logit_rows) {
             return GpuStepLimits{max_tokens, max_sequences, max_logit_rows};
           }),
           py::kw_only(), py::arg("max_tokens"), py::arg("max_sequences"), py::arg("max_logit_rows"))
      .def_readonly("max_tokens", &GpuStepLimits::max_tokens)
      .def_readonly("max_sequences", &GpuStepLimits::max_sequences)
      .def_readonly("max_logit_rows", &GpuStepLimits::max_logit_rows);
  py::class_<TensorRtWeight>(module, "TensorRtWeight", "A weight that is an input of the plan.")
      .def(py::init(&make_weight), py::kw_only(), py::arg("name"), py::arg("data"), py::arg("shape"),
           "data: a contiguous array, which this object keeps.")
      .def_readonly("name", &TensorRtWeight::name)
      .def_readonly("shape", &TensorRtWeight::shape);
}

/// Returns a getter of a field of a program's model.
template <class Member>
auto of_model(Member GpuModelDescription::* member) {
  return [member](const TensorRtProgram& self) -> const Member& { return self.model.*member; };
}

void bind_tensorrt_program(py::module_& module) {
  using P = TensorRtProgram;
  py::class_<P>(module, "TensorRtProgram", "Description of a TensorRT plan for the session.")
      .def(py::init([](DType dtype, std::int64_t vocab_size, std::int32_t num_layers,
                       std::vector<AttentionShape> attention, std::int32_t max_batch_size,
                       std::int32_t max_num_tokens, std::int32_t max_input_len, std::int32_t max_seq_len,
                       std::int32_t max_beam_width, std::int32_t tokens_per_block,
                       std::int32_t max_reusable_prompt_len, bool has_prompt_lengths,
                       std::int32_t max_kv_blocks, std::int32_t num_adapter_slots,
                       const GpuStepLimits& prefill, const GpuStepLimits& decode,
                       std::vector<TensorRtWeight> weights, LoraLayout lora) {
             return P{.model = {.dtype = dtype,
                                .vocab_size = vocab_size,
                                .num_layers = num_layers,
                                .attention = std::move(attention),
                                .max_batch_size = max_batch_size,
                                .max_num_tokens = max_num_tokens,
                                .max_input_len = max_input_len,
                                .max_seq_len = max_seq_len,
                                .max_beam_width = max_beam_width,
                                .tokens_per_block = tokens_per_block,
                                .max_reusable_prompt_len = max_reusable_prompt_len,
                                .has_prompt_lengths = has_prompt_lengths,
                                .max_kv_blocks = max_kv_blocks,
                                .num_adapter_slots = num_adapter_slots,
                                .prefill = prefill,
                                .decode = decode,
                                .lora = std::move(lora)},
                      .weights = std::move(weights)};
           }),
           py::kw_only(), py::arg("dtype"), py::arg("vocab_size"), py::arg("num_layers"),
           py::arg("attention"), py::arg("max_batch_size"), py::arg("max_num_tokens"),
           py::arg("max_input_len"), py::arg("max_seq_len"), py::arg("max_beam_width") = 1,
           py::arg("tokens_per_block"), py::arg("max_reusable_prompt_len"), py::arg("has_prompt_lengths"),
           py::arg("max_kv_blocks"), py::arg("num_adapter_slots"), py::arg("prefill"), py::arg("decode"),
           py::arg("weights"), py::arg("lora"))
      .def_property_readonly("dtype", of_model(&GpuModelDescription::dtype))
      .def_property_readonly("vocab_size", of_model(&GpuModelDescription::vocab_size))
      .def_property_readonly("num_layers", of_model(&GpuModelDescription::num_layers))
      .def_property_readonly("attention", of_model(&GpuModelDescription::attention))
      .def_property_readonly("max_batch_size", of_model(&GpuModelDescription::max_batch_size))
      .def_property_readonly("max_num_tokens", of_model(&GpuModelDescription::max_num_tokens))
      .def_property_readonly("max_input_len", of_model(&GpuModelDescription::max_input_len))
      .def_property_readonly("max_seq_len", of_model(&GpuModelDescription::max_seq_len))
      .def_property_readonly("max_beam_width", of_model(&GpuModelDescription::max_beam_width))
      .def_property_readonly("tokens_per_block", of_model(&GpuModelDescription::tokens_per_block))
      .def_property_readonly("max_reusable_prompt_len",
                             of_model(&GpuModelDescription::max_reusable_prompt_len))
      .def_property_readonly("has_prompt_lengths", of_model(&GpuModelDescription::has_prompt_lengths))
      .def_property_readonly("max_kv_blocks", of_model(&GpuModelDescription::max_kv_blocks))
      .def_property_readonly("num_adapter_slots", of_model(&GpuModelDescription::num_adapter_slots))
      .def_property_readonly("prefill", of_model(&GpuModelDescription::prefill))
      .def_property_readonly("decode", of_model(&GpuModelDescription::decode))
      .def_readonly("weights", &P::weights)
      .def_property_readonly("lora", of_model(&GpuModelDescription::lora))
      .def(
          "validate", [](const P& self) { return self.model.validate().list(); },
          "Returns everything that is inconsistent; [] if there is nothing.");
}

}  // namespace

void bind_tensorrt(py::module_& module) {
  bind_program_parts(module);
  bind_tensorrt_program(module);
  py::class_<TensorRtEngine, EngineHandle>(module, "TensorRtEngine",
                                           "A TensorRT plan on a device, with its KV pool.")
      .def(py::init<TensorRtProgram, std::shared_ptr<Device>, py::object, py::object, bool>(),
           py::arg("program"), py::arg("device"), py::arg("prefill"), py::arg("decode"), py::kw_only(),
           py::arg("cuda_graphs") = true,
           "prefill, decode: execution contexts of the plan's two profiles, with TensorRT's methods "
           "set_input_shape(name, dims) -> bool, set_tensor_address(name, address) -> bool and "
           "execute_async_v3(stream) -> bool, and with another(), which makes another context for the same "
           "profile. With cuda_graphs, decode steps run as CUDA graphs, each with its own context. Raises "
           "EngineError with everything that TensorRtProgram.validate() finds, and ConfigError if the device "
           "has too little memory.");
}

}  // namespace adaptrt::bindings
