#include <cstdint>
#include <memory>

#include "adaptrt/device/device.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_device(py::module_& module) {
  py::class_<DeviceInfo>(module, "DeviceInfo", "Name and capability of a device.")
      .def_readonly("name", &DeviceInfo::name)
      .def_property_readonly(
          "compute_capability",
          [](const DeviceInfo& self) {
            return py::make_tuple(self.compute_capability_major, self.compute_capability_minor);
          },
          "(major, minor)");
  py::class_<DeviceMemoryInfo>(module, "DeviceMemoryInfo", "Memory of a device, in bytes.")
      .def_readonly("free_bytes", &DeviceMemoryInfo::free_bytes)
      .def_readonly("total_bytes", &DeviceMemoryInfo::total_bytes);
  py::class_<Allocation>(module, "Allocation", "Memory of a device; it is freed with this object.")
      .def_property_readonly(
          "address", [](const Allocation& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_property_readonly("num_bytes", &Allocation::bytes);
  py::class_<Stream>(module, "Stream", "A stream: work that a device does in order.")
      .def_property_readonly(
          "handle", [](const Stream& self) { return reinterpret_cast<std::uintptr_t>(self.handle()); },
          "Address of the stream, for kernels and execution contexts.")
      .def("synchronize", &Stream::synchronize, py::call_guard<py::gil_scoped_release>(),
           "Waits for the work. Raises StepError if the device reports an error.");
  // Subclasses are bound by the modules that have a device: only those link its vendor's libraries.
  py::class_<Device, std::shared_ptr<Device>>(module, "Device", "A device with memory of its own.")
      .def_property_readonly("info", [](const Device& self) { return self.info(); })
      .def("memory", &Device::memory, py::call_guard<py::gil_scoped_release>(),
           "Returns the free and total memory. Raises StepError if the device reports an error.")
      .def("allocate", &Device::allocate, py::arg("num_bytes"), py::call_guard<py::gil_scoped_release>(),
           "Allocates memory on the device, aligned to 256 bytes. Raises ConfigError with the requested and "
           "the free bytes.")
      .def("make_stream", &Device::make_stream, py::keep_alive<0, 1>(),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace adaptrt::bindings
