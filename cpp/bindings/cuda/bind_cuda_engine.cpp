#include <cstddef>
#include <memory>
#include <utility>

#include "adaptrt/cuda_program/cuda_engine.h"
#include "adaptrt/cuda_program/device_limits.h"
#include "bindings.h"
#include "engine_handle.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// A CUDA engine made by Python.
class CudaEngine : public EngineHandle {
 public:
  CudaEngine(const Program& program, std::shared_ptr<Device> device, bool cuda_graphs,
             std::size_t weight_memory, bool look_ahead, bool hopper_prefill, NeuronUsage neuron_usage) {
    hold(make_cuda_engine(program, std::move(device), {.cuda_graphs = cuda_graphs, .look_ahead = look_ahead},
                          weight_memory, hopper_prefill, std::move(neuron_usage)));
  }
};

}  // namespace

void bind_cuda_engine(py::module_& module) {
  // Local, since the tests have another module with this class.
  py::class_<CudaEngine, EngineHandle>(module, "CudaEngine", py::module_local(),
                                       "A program on an NVIDIA GPU, its weights and its KV pool.")
      .def(py::init<const Program&, std::shared_ptr<Device>, bool, std::size_t, bool, bool, NeuronUsage>(),
           py::arg("program"), py::arg("device"), py::kw_only(), py::arg("cuda_graphs") = true,
           py::arg("weight_memory") = 0, py::arg("look_ahead") = true, py::arg("hopper_prefill") = false,
           py::arg("neuron_usage") = NeuronUsage{}, py::call_guard<py::gil_scoped_release>(),
           "Copies the program's weights to the device. cuda_graphs: decode steps run as CUDA graphs. "
           "weight_memory: bytes of weights on the device; if they need more, layers stay in host memory and "
           "are copied ahead of use. 0: no limit. look_ahead: the device may begin a decode step before the "
           "host has the tokens of the step before. hopper_prefill: prompts use wgmma and the copy engine of "
           "compute capability 9.0, with the same bits; no GPU has run this yet. neuron_usage: counts of "
           "each neuron's "
           "use, for each sparse MLP; the most used neurons stay on the device. Raises "
           "EngineError with everything that Program.validate() finds and everything that cannot run on a "
           "GPU, "
           "ConfigError if the device has too little memory, weight_memory is too small, or the device or a "
           "layer "
           "cannot have hopper_prefill, and StepError if "
           "it fails.");
  module.def(
      "problems_on_cuda", [](const Program& program) { return problems_on_cuda(program).list(); },
      py::arg("program"), "Returns everything in a valid program that the CUDA engine cannot run.");
  module.def(
      "measure_device_limits",
      [](Device& device, int dtype, std::size_t copy_bytes, std::int64_t product_size, std::int32_t repeats,
         std::int32_t tries) {
        const DeviceLimits limits = [&] {
          const py::gil_scoped_release no_gil;
          return measure_device_limits(
              device, dtype_of(dtype),
              {.copy_bytes = copy_bytes, .product_size = product_size, .repeats = repeats, .tries = tries});
        }();
        return py::make_tuple(limits.copy_bandwidth, limits.product_flops);
      },
      py::arg("device"), py::kw_only(), py::arg("dtype"), py::arg("copy_bytes"), py::arg("product_size"),
      py::arg("repeats"), py::arg("tries"),
      "Returns (bytes per second that a copy on the device reads and writes, FLOPs per second of a product "
      "of "
      "square matrices) of the fastest of `tries` tries of `repeats` copies and products. dtype: a value of "
      "DType. product_size: rows of a matrix, a multiple of 8. Raises ConfigError for invalid sizes and if "
      "the "
      "device has too little memory, and StepError if it fails.");
}

}  // namespace adaptrt::bindings
