#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "adaptrt/cuda/paged_attention_kernel.h"
#include "bindings.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

using cuda::PagedAttentionKernel;

std::unique_ptr<PagedAttentionKernel> make_attention_kernel(
    int dtype, std::int32_t num_heads, std::int32_t num_kv_heads, std::int32_t head_dim, float scale,
    std::int32_t sliding_window, float softcap, bool interleaved, bool int8_pool, std::int32_t chunk,
    float query_scaling_beta, std::int32_t query_scaling_length, std::int32_t query_scaling_offset,
    bool hopper_prefill) {
  return std::make_unique<PagedAttentionKernel>(
      cuda::PagedAttentionConfig{.dtype = dtype_of(dtype),
                                 .num_heads = num_heads,
                                 .num_kv_heads = num_kv_heads,
                                 .head_dim = head_dim,
                                 .scale = scale,
                                 .sliding_window = sliding_window,
                                 .softcap = softcap,
                                 .interleaved = interleaved,
                                 .int8_pool = int8_pool,
                                 .chunk = chunk,
                                 .query_scaling_beta = query_scaling_beta,
                                 .query_scaling_length = query_scaling_length,
                                 .query_scaling_offset = query_scaling_offset,
                                 .hopper_prefill = hopper_prefill});
}

void enqueue_attention(const PagedAttentionKernel& kernel, std::int32_t tokens, std::int32_t sequences,
                       std::int32_t max_blocks, std::int32_t tokens_per_block, std::int32_t rotary_half,
                       const std::vector<Address>& inputs, const std::vector<Address>& outputs,
                       Address workspace, Address stream, Address sinks, Address counters) {
  check_addresses(inputs, 9, "q, k, v, kv_pool, block_tables, sequence_offsets, positions, cosine, sine");
  check_addresses(outputs, 2, "attended, kv_pool_out");
  if (outputs[1] != inputs[3]) throw ConfigError("kv_pool_out must be at the address of kv_pool");
  kernel.enqueue({.tokens = tokens,
                  .sequences = sequences,
                  .max_blocks = max_blocks,
                  .tokens_per_block = tokens_per_block,
                  .rotary_half = rotary_half,
                  .q_stride = kernel.config().num_heads * kernel.config().head_dim,
                  .kv_stride = kernel.config().num_kv_heads * kernel.config().head_dim},
                 {.q = at_address<const void>(inputs[0]),
                  .k = at_address<const void>(inputs[1]),
                  .v = at_address<const void>(inputs[2]),
                  .kv_pool = at_address<void>(outputs[1]),
                  .block_tables = at_address<const std::int32_t>(inputs[4]),
                  .sequence_offsets = at_address<const std::int32_t>(inputs[5]),
                  .positions = at_address<const std::int32_t>(inputs[6]),
                  .cosine = at_address<const float>(inputs[7]),
                  .sine = at_address<const float>(inputs[8]),
                  .sinks = at_address<const float>(sinks),
                  .counters = at_address<std::uint32_t>(counters),
                  .attended = at_address<void>(outputs[0])},
                 at_address<void>(workspace), at_address<void>(stream));
}

}  // namespace

void bind_attention_kernel(py::module_& module) {
  // Local, since the tests have another module with this class.
  py::class_<PagedAttentionKernel>(
      module, "PagedAttentionKernel", py::module_local(),
      "Kernel of the plugin PagedAttention. A token whose block is -1 writes nothing and gets zeros.")
      .def(py::init(&make_attention_kernel), py::arg("dtype"), py::arg("num_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim"), py::arg("scale"), py::arg("sliding_window"), py::arg("softcap"),
           py::arg("interleaved") = false, py::arg("int8_pool") = false, py::arg("chunk") = 0,
           py::arg("query_scaling_beta") = 0.0F, py::arg("query_scaling_length") = 1,
           py::arg("query_scaling_offset") = 0, py::arg("hopper_prefill") = false,
           "dtype: a value of DType, float16 or bfloat16. The other arguments are the plugin's attributes. "
           "interleaved: neighbouring elements rotate together. int8_pool: keys and values are int8, with a "
           "scale for each head. chunk: tokens attend only to their own chunk of so many positions; 0: no "
           "chunks. "
           "Queries at position p are multiplied by 1 + query_scaling_beta * ln(1 + floor((p + "
           "query_scaling_offset) / query_scaling_length)). hopper_prefill: prefills use the instructions of "
           "compute capability 9.0. Raises ConfigError.")
      .def("workspace_bytes", &PagedAttentionKernel::workspace_bytes, py::arg("max_tokens"),
           py::arg("max_sequences"),
           "Bytes of workspace that enqueue needs for up to this many tokens and sequences.")
      .def("counter_bytes", &PagedAttentionKernel::counter_bytes, py::arg("max_sequences"),
           "Bytes of counters, for up to this many sequences.")
      .def("enqueue", &enqueue_attention, py::arg("tokens"), py::arg("sequences"), py::arg("max_blocks"),
           py::arg("tokens_per_block"), py::arg("rotary_half"), py::arg("inputs"), py::arg("outputs"),
           py::arg("workspace"), py::arg("stream"), py::arg("sinks") = 0, py::arg("counters") = 0,
           "Enqueues the launches in a stream. q, k and v have no gaps between rows. Addresses are device "
           "addresses, in the order of the plugin's definition; kv_pool_out equals kv_pool. sinks: float32 "
           "[num_heads], or 0. counters: zeros, which are zeros again after the launches, or 0. Raises "
           "ConfigError for invalid sizes, and StepError if "
           "CUDA reports an error.");
}

}  // namespace adaptrt::bindings
