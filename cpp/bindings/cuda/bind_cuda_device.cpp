#include <memory>

#include "adaptrt/cuda/cuda_device.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_cuda_device(py::module_& module) {
  py::class_<CudaDevice, Device, std::shared_ptr<CudaDevice>>(module, "CudaDevice",
                                                              "An NVIDIA GPU, by its CUDA index.")
      .def(py::init<int>(), py::arg("index") = 0, py::call_guard<py::gil_scoped_release>(),
           "Raises ConfigError if the driver, a newer driver or the GPU is missing, and says which.");
}

}  // namespace adaptrt::bindings
