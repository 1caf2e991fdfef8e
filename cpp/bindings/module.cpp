#include "bindings.h"
#include "gil_safe_object.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of AdaptRT: kernels, LoRA cache, scheduler and executor.";
  adaptrt::bindings::bind_gil_safe_objects();
  adaptrt::bindings::bind_errors(module);
  adaptrt::bindings::bind_core(module);
  adaptrt::bindings::bind_device(module);
  adaptrt::bindings::bind_lora(module);
  adaptrt::bindings::bind_engine(module);
  adaptrt::bindings::bind_exec(module);
}
