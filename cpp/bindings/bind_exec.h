#pragma once

#include <pybind11/pybind11.h>

namespace adaptrt::bindings {

// The parts of bind_exec(), in the order in which they must be called.
void bind_guide(pybind11::module_& module);
void bind_exec_config(pybind11::module_& module);
void bind_exec_types(pybind11::module_& module);
void bind_kv_cache_events(pybind11::module_& module);
void bind_executor(pybind11::module_& module);

}  // namespace adaptrt::bindings
