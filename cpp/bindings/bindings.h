#pragma once

#include <pybind11/pybind11.h>

namespace adaptrt::bindings {

// One function a room; each adds its names to the module. Errors come first: the others may raise.
void bind_errors(pybind11::module_& module);
void bind_core(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_lora(pybind11::module_& module);
void bind_weights(pybind11::module_& module);
void bind_lora_layout(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_program(pybind11::module_& module);
void bind_profile(pybind11::module_& module);
void bind_tensorrt(pybind11::module_& module);
void bind_ranks(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_exec(pybind11::module_& module);

}  // namespace adaptrt::bindings
