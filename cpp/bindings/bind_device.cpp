#include <memory>

#include "adaptrt/device/device.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_device(py::module_& module) {
  py::class_<DeviceInfo>(module, "DeviceInfo", "What a device is.")
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
  // Subclasses are bound by the modules that have a device: only those link its vendor's libraries.
  py::class_<Device, std::shared_ptr<Device>>(module, "Device", "A device with memory of its own.")
      .def_property_readonly("info", [](const Device& self) { return self.info(); })
      .def("memory", &Device::memory, py::call_guard<py::gil_scoped_release>(),
           "What is free now. Raises StepError when the device reports an error.");
}

}  // namespace adaptrt::bindings
