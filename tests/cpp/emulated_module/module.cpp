#include <pybind11/functional.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "bindings.h"
#include "support/host_device.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

using testing::Failure;
using testing::HostDevice;

/// Makes a callable that streams may store, run and destroy on any thread.
std::function<void()> kept_callable(py::function function) {
  const std::shared_ptr<py::function> kept(new py::function(std::move(function)), [](py::function* dropped) {
    const py::gil_scoped_acquire gil;
    std::default_delete<py::function>{}(dropped);
  });
  return [kept] {
    const py::gil_scoped_acquire gil;
    (*kept)();
  };
}

void bind_host_device(py::module_& module) {
  py::class_<HostDevice, Device, std::shared_ptr<HostDevice>>(module, "CudaDevice",
                                                              "A device in host memory, as _cuda.CudaDevice.")
      .def(py::init([](int index, std::size_t total_bytes) {
             if (index != 0)
               throw ConfigError("there is no GPU " + std::to_string(index) + "; accepted: 0 to 0");
             return std::make_shared<HostDevice>(total_bytes);
           }),
           py::arg("index") = 0, py::kw_only(), py::arg("total_bytes") = std::size_t{1} << 32)
      .def(
          "fail",
          [](HostDevice& self, const std::string& call, bool for_good, int successes) {
            self.fail(call, for_good ? Failure::kForGood : Failure::kOnce, successes);
          },
          py::arg("call"), py::kw_only(), py::arg("for_good") = false, py::arg("successes") = 0,
          "The call of this name fails after `successes` more of it.")
      .def("calls", &HostDevice::calls, py::arg("call"), "Calls of this name so far.")
      .def(
          "owns",
          [](const HostDevice& self, std::uintptr_t address, std::size_t bytes) {
            return self.owns(reinterpret_cast<const void*>(address), bytes);
          },
          py::arg("address"), py::arg("bytes"), "Whether these bytes lie in one living allocation.");
  module.def(
      "submit",
      [](std::uintptr_t stream, py::function work) {
        testing::submit(testing::host_stream(reinterpret_cast<void*>(stream)),
                        kept_callable(std::move(work)));
      },
      py::arg("stream"), py::arg("work"),
      "Puts a call into a stream: made now, or at each launch of the graph that is being captured.");
}

}  // namespace
}  // namespace adaptrt::bindings

PYBIND11_MODULE(adaptrt_cuda_emulated, module) {
  module.doc() = "adaptrt._cuda on the host, for tests.";
  pybind11::module_::import("adaptrt._core");
  adaptrt::bindings::bind_host_device(module);
  adaptrt::bindings::bind_lora_kernel(module);
  adaptrt::bindings::bind_attention_kernel(module);
  adaptrt::bindings::bind_product_kernel(module);
  adaptrt::bindings::bind_row_kernels(module);
  adaptrt::bindings::bind_expert_kernels(module);
  adaptrt::bindings::bind_state_kernels(module);
  adaptrt::bindings::bind_sparse_kernels(module);
  adaptrt::bindings::bind_cuda_engine(module);
}
