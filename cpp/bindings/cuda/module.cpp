#include "bindings.h"

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "NVIDIA GPUs: the device, the engine, and the kernels of the plugins.";
  // Its Device is the base of ours, and its errors are what we throw.
  pybind11::module_::import("adaptrt._core");
  // The two modules share C++ types, so they must be of one version; Python compares this one before it uses
  // the module.
  module.attr("__version__") = ADAPTRT_VERSION;
  adaptrt::bindings::bind_cuda_device(module);
  adaptrt::bindings::bind_lora_kernel(module);
  adaptrt::bindings::bind_attention_kernel(module);
  adaptrt::bindings::bind_product_kernel(module);
  adaptrt::bindings::bind_row_kernels(module);
  adaptrt::bindings::bind_expert_kernels(module);
  adaptrt::bindings::bind_state_kernels(module);
  adaptrt::bindings::bind_sparse_kernels(module);
  adaptrt::bindings::bind_cuda_engine(module);
}
