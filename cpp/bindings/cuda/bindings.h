#pragma once

#include <pybind11/pybind11.h>

namespace adaptrt::bindings {

// Names of the module _cuda. The kernels' bindings also serve the tests' emulated module, and include no CUDA
// header.
void bind_cuda_device(pybind11::module_& module);
void bind_lora_kernel(pybind11::module_& module);
void bind_attention_kernel(pybind11::module_& module);
void bind_product_kernel(pybind11::module_& module);
void bind_row_kernels(pybind11::module_& module);
void bind_expert_kernels(pybind11::module_& module);
void bind_state_kernels(pybind11::module_& module);
void bind_sparse_kernels(pybind11::module_& module);
void bind_cuda_engine(pybind11::module_& module);

}  // namespace adaptrt::bindings
