#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "adaptrt/cuda/product_kernel.h"
#include "adaptrt/cuda/quantized_product_kernel.h"
#include "bindings.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

using cuda::ProductKernel;
using cuda::QuantizedProductKernel;

std::unique_ptr<ProductKernel> make_product_kernel(int dtype, std::int32_t in_size, std::int32_t out_size,
                                                   bool portable, bool float32_output) {
  return std::make_unique<ProductKernel>(ProductKernel::Config{.dtype = dtype_of(dtype),
                                                               .in_size = in_size,
                                                               .out_size = out_size,
                                                               .portable = portable,
                                                               .float32_output = float32_output});
}

void enqueue_product(const ProductKernel& kernel, std::int64_t tokens, const std::vector<Address>& inputs,
                     const std::vector<Address>& outputs, Address stream) {
  check_addresses(inputs, 2, "x, weights");
  check_addresses(outputs, 1, "y");
  kernel.enqueue(tokens,
                 {.x = at_address<const void>(inputs[0]), .weights = at_address<const void>(inputs[1])},
                 at_address<void>(outputs[0]), at_address<void>(stream));
}

std::unique_ptr<QuantizedProductKernel> make_quantized_product_kernel(int dtype, std::int32_t bits,
                                                                      std::int32_t in_size,
                                                                      std::int32_t out_size,
                                                                      std::int32_t group_size,
                                                                      bool float32_output) {
  return std::make_unique<QuantizedProductKernel>(
      QuantizedProductKernel::Config{.dtype = dtype_of(dtype),
                                     .bits = bits,
                                     .in_size = in_size,
                                     .out_size = out_size,
                                     .group_size = group_size,
                                     .float32_output = float32_output});
}

void enqueue_quantized_product(const QuantizedProductKernel& kernel, std::int64_t tokens,
                               const std::vector<Address>& inputs, const std::vector<Address>& outputs,
                               Address stream) {
  check_addresses(inputs, 4, "x, weights, scales, zeros");
  check_addresses(outputs, 1, "y");
  kernel.enqueue(tokens,
                 {.x = at_address<const void>(inputs[0]),
                  .weights = at_address<const void>(inputs[1]),
                  .scales = at_address<const float>(inputs[2]),
                  .zeros = at_address<const std::uint8_t>(inputs[3])},
                 at_address<void>(outputs[0]), at_address<void>(stream));
}

}  // namespace

void bind_product_kernel(py::module_& module) {
  // Local, since the tests have another module with this class.
  py::class_<ProductKernel>(module, "ProductKernel", py::module_local(),
                            "A linear layer's product. A token's bits do not depend on the other tokens.")
      .def(
          py::init(&make_product_kernel), py::arg("dtype"), py::arg("in_size"), py::arg("out_size"),
          py::kw_only(), py::arg("portable") = false, py::arg("float32_output") = false,
          "dtype: a value of DType, float16 or bfloat16. Sizes are multiples of 8. portable: use the kernel "
          "that runs on every GPU, with the same bits. float32_output: y is float32, and not rounded. Raises "
          "ConfigError.")
      .def("enqueue", &enqueue_product, py::arg("tokens"), py::arg("inputs"), py::arg("outputs"),
           py::arg("stream"),
           "Enqueues one launch in a stream: y[tokens, out] = x[tokens, in] weights[out, in]^T. inputs: "
           "device addresses of x and weights. outputs: device address of y. All are multiples of 16. "
           "Earlier work in the stream must not write the weights. Raises ConfigError for invalid arguments, "
           "and StepError if CUDA reports an error.");
  py::class_<QuantizedProductKernel>(module, "QuantizedProductKernel", py::module_local(),
                                     "ProductKernel for integer weights that are scaled in groups of inputs.")
      .def(py::init(&make_quantized_product_kernel), py::arg("dtype"), py::arg("bits"), py::arg("in_size"),
           py::arg("out_size"), py::arg("group_size"), py::kw_only(), py::arg("float32_output") = false,
           "dtype: a value of DType, float16 or bfloat16. bits: 8 or 4. group_size: a multiple of 16, or 0. "
           "Raises ConfigError.")
      .def(
          "enqueue", &enqueue_quantized_product, py::arg("tokens"), py::arg("inputs"), py::arg("outputs"),
          py::arg("stream"),
          "Enqueues one launch in a stream. inputs: device addresses of x, weights, scales, and zeros or 0; "
          "outputs: of y. Raises ConfigError for invalid arguments, and StepError if CUDA reports an error.");
}

}  // namespace adaptrt::bindings
