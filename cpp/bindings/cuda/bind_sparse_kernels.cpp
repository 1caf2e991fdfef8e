#include <cstdint>

#include "adaptrt/cuda/sparse_kernels.h"
#include "bindings.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

void enqueue_mark_active(int dtype, std::int64_t tokens, std::int64_t neurons, Address gate, Address bias,
                         float threshold, Address masks, Address stream) {
  cuda::enqueue(cuda::MarkActive{.dtype = dtype_of(dtype),
                                 .tokens = tokens,
                                 .neurons = neurons,
                                 .gate = at_address<const void>(gate),
                                 .bias = at_address<const float>(bias),
                                 .threshold = threshold,
                                 .masks = at_address<std::uint16_t>(masks)},
                at_address<void>(stream));
}

cuda::NeuronVectors vectors_of(Address slots, Address resident, Address pinned) {
  return {.slots = at_address<const std::int32_t>(slots),
          .resident = at_address<const void>(resident),
          .pinned = at_address<const void>(pinned)};
}

void enqueue_sparse_up(int dtype, std::int64_t tokens, std::int64_t in_size, std::int64_t neurons, Address x,
                       Address masks, Address slots, Address resident, Address pinned, Address y,
                       Address stream) {
  cuda::enqueue(cuda::SparseUp{.dtype = dtype_of(dtype),
                               .tokens = tokens,
                               .in_size = in_size,
                               .neurons = neurons,
                               .x = at_address<const void>(x),
                               .masks = at_address<const std::uint16_t>(masks),
                               .rows = vectors_of(slots, resident, pinned),
                               .y = at_address<void>(y)},
                at_address<void>(stream));
}

void enqueue_sparse_down(int dtype, std::int64_t tokens, std::int64_t neurons, std::int64_t out_size,
                         Address x, Address masks, Address slots, Address resident, Address pinned, Address y,
                         Address stream) {
  cuda::enqueue(cuda::SparseDown{.dtype = dtype_of(dtype),
                                 .tokens = tokens,
                                 .neurons = neurons,
                                 .out_size = out_size,
                                 .x = at_address<const void>(x),
                                 .masks = at_address<const std::uint16_t>(masks),
                                 .columns = vectors_of(slots, resident, pinned),
                                 .y = at_address<void>(y)},
                at_address<void>(stream));
}

}  // namespace

// Addresses are device addresses, of `pinned` those of pinned host memory; 0 is no tensor. See
// adaptrt/cuda/sparse_kernels.h for shapes.
void bind_sparse_kernels(py::module_& module) {
  module.attr("MAX_SPARSE_TOKENS") = cuda::kMaxSparseTokens;
  module.def("enqueue_mark_active", &enqueue_mark_active, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
             py::arg("neurons"), py::arg("gate"), py::arg("bias") = 0, py::arg("threshold") = 0.0F,
             py::arg("masks"), py::arg("stream"), "Writes the masks of the neurons whose gates are open.");
  module.def("enqueue_sparse_up", &enqueue_sparse_up, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
             py::arg("in_size"), py::arg("neurons"), py::arg("x"), py::arg("masks"), py::arg("slots"),
             py::arg("resident"), py::arg("pinned"), py::arg("y"), py::arg("stream"),
             "y = x W^T for active neurons, whose rows of W are on the device or in pinned host memory.");
  module.def("enqueue_sparse_down", &enqueue_sparse_down, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
             py::arg("neurons"), py::arg("out_size"), py::arg("x"), py::arg("masks"), py::arg("slots"),
             py::arg("resident"), py::arg("pinned"), py::arg("y"), py::arg("stream"),
             "y = x W^T, of which only the columns of W for active neurons are read.");
}

}  // namespace adaptrt::bindings
