#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/gpu/gpu_fields.h"
#include "adaptrt/tensorrt/tensorrt_engine.h"
#include "adaptrt/tensorrt/tensorrt_fields.h"
#include "bind_struct.h"
#include "bindings.h"
#include "engine_handle.h"
#include "gil_safe_object.h"
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
          .owner = std::make_shared<GilSafeObject>(data)};
}

void bind_tensorrt_program(py::module_& module) {
  bind_record<GpuStepLimits>(module, "GpuStepLimits", "Maximum sizes of a step of a model on a GPU.");
  bind_record<GpuModelDescription>(module, "GpuModelDescription",
                                   "Sizes of a model on a GPU, from which the session follows.")
      .def(
          "validate", [](const GpuModelDescription& self) { return self.validate().list(); },
          "Returns everything that is inconsistent; [] if there is nothing.");
  bind_read_only<TensorRtWeight>(module, "TensorRtWeight", "A weight that is an input of the plan.")
      .def(py::init(&make_weight), py::kw_only(), py::arg("name"), py::arg("data"), py::arg("shape"),
           "data: a contiguous array, which this object keeps.");
  bind_record<TensorRtProgram>(module, "TensorRtProgram", "Description of a TensorRT plan for the session.");
}

}  // namespace

void bind_tensorrt(py::module_& module) {
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
           "EngineError with everything that GpuModelDescription.validate() finds, and ConfigError if the "
           "device "
           "has too little memory.");
}

}  // namespace adaptrt::bindings
