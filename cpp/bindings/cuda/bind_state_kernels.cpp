#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>

#include "adaptrt/cuda/latent_kernels.h"
#include "adaptrt/cuda/state_kernels.h"
#include "bindings.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// (sequences, sequence_offsets, slots, states, slot_stride)
using States = std::tuple<std::int64_t, Address, Address, Address, std::int64_t>;

cuda::SequenceStates states_of(const States& states) {
  const auto [sequences, offsets, slots, address, slot_stride] = states;
  return {.sequences = sequences,
          .sequence_offsets = at_address<const std::int32_t>(offsets),
          .slots = at_address<const std::int32_t>(slots),
          .states = at_address<float>(address),
          .slot_stride = slot_stride};
}

void enqueue_causal_convolution(const States& states, std::int64_t width, std::int64_t stride,
                                std::int64_t taps, Address weight, Address bias, Address values,
                                Address stream) {
  cuda::enqueue(cuda::CausalConvolution{.states = states_of(states),
                                        .width = width,
                                        .stride = stride,
                                        .taps = taps,
                                        .weight = at_address<const float>(weight),
                                        .bias = at_address<const float>(bias),
                                        .values = at_address<float>(values)},
                at_address<void>(stream));
}

void enqueue_gated_convolution(int dtype, const States& states, std::int64_t width, std::int64_t taps,
                               Address weight, Address bias, Address input, Address output, Address stream) {
  cuda::enqueue(cuda::GatedConvolution{.dtype = dtype_of(dtype),
                                       .states = states_of(states),
                                       .width = width,
                                       .taps = taps,
                                       .weight = at_address<const float>(weight),
                                       .bias = at_address<const float>(bias),
                                       .input = at_address<const float>(input),
                                       .output = at_address<void>(output)},
                at_address<void>(stream));
}

void enqueue_gated_delta(const States& states, const DeltaShape& shape, std::int64_t stride, Address qkv,
                         Address gates, Address log_decay, Address time_bias, float update_scale,
                         Address output, Address stream) {
  cuda::enqueue(cuda::GatedDelta{.states = states_of(states),
                                 .shape = shape,
                                 .stride = stride,
                                 .qkv = at_address<const float>(qkv),
                                 .gates = at_address<const float>(gates),
                                 .log_decay = at_address<const float>(log_decay),
                                 .time_bias = at_address<const float>(time_bias),
                                 .update_scale = update_scale,
                                 .output = at_address<float>(output)},
                at_address<void>(stream));
}

void enqueue_selective_scan(const States& states, const ScanShape& shape, std::int64_t stride, Address values,
                            Address log_decay, Address time_bias, Address skip, float time_min,
                            float time_max, Address output, Address stream) {
  cuda::enqueue(cuda::SelectiveScan{.states = states_of(states),
                                    .shape = shape,
                                    .stride = stride,
                                    .values = at_address<const float>(values),
                                    .log_decay = at_address<const float>(log_decay),
                                    .time_bias = at_address<const float>(time_bias),
                                    .skip = at_address<const float>(skip),
                                    .time_min = time_min,
                                    .time_max = time_max,
                                    .output = at_address<float>(output)},
                at_address<void>(stream));
}

void enqueue_gated_rms_norm(int dtype, std::int64_t rows, std::int64_t width, std::int64_t group,
                            std::int64_t weight_size, Address input, Address gate, Address weight,
                            float epsilon, bool gate_first, Address output, Address stream) {
  cuda::enqueue(cuda::GatedRmsNorm{.dtype = dtype_of(dtype),
                                   .rows = rows,
                                   .width = width,
                                   .group = group,
                                   .weight_size = weight_size,
                                   .gate_stride = width,
                                   .input = at_address<const float>(input),
                                   .gate = at_address<const float>(gate),
                                   .weight = at_address<const float>(weight),
                                   .epsilon = epsilon,
                                   .gate_first = gate_first,
                                   .output = at_address<void>(output)},
                at_address<void>(stream));
}

void enqueue_sigmoid_gate(int dtype, std::int64_t rows, std::int64_t width, Address gate, Address output,
                          Address stream) {
  cuda::enqueue(cuda::SigmoidGate{.dtype = dtype_of(dtype),
                                  .rows = rows,
                                  .width = width,
                                  .gate_stride = width,
                                  .gate = at_address<const void>(gate),
                                  .output = at_address<void>(output)},
                at_address<void>(stream));
}

void enqueue_join_queries(int dtype, std::int64_t tokens, std::int32_t heads, std::int64_t latent_dim,
                          std::int64_t rotary_dim, std::int64_t plain_dim, Address queries, Address products,
                          Address rows, Address norm, float epsilon, Address qk, Address stream) {
  cuda::enqueue(cuda::JoinQueries{.dtype = dtype_of(dtype),
                                  .tokens = tokens,
                                  .heads = heads,
                                  .latent_dim = latent_dim,
                                  .rotary_dim = rotary_dim,
                                  .plain_dim = plain_dim,
                                  .queries = at_address<const void>(queries),
                                  .products = at_address<const void>(products),
                                  .rows = at_address<const void>(rows),
                                  .norm = at_address<const float>(norm),
                                  .epsilon = epsilon,
                                  .qk = at_address<void>(qk)},
                at_address<void>(stream));
}

void enqueue_latent_attention(int dtype, std::int32_t tokens, std::int32_t sequences, std::int32_t max_blocks,
                              std::int32_t tokens_per_block, std::int32_t num_heads, std::int32_t key_dim,
                              std::int32_t rotary_dim, float scale, Address qk, Address kv_pool,
                              Address block_tables, Address sequence_offsets, Address positions,
                              Address cosine, Address sine, Address attended, Address stream) {
  cuda::enqueue(cuda::LatentAttention{.dtype = dtype_of(dtype),
                                      .tokens = tokens,
                                      .sequences = sequences,
                                      .max_blocks = max_blocks,
                                      .tokens_per_block = tokens_per_block,
                                      .num_heads = num_heads,
                                      .key_dim = key_dim,
                                      .rotary_dim = rotary_dim,
                                      .interleaved = true,
                                      .scale = scale,
                                      .qk = at_address<const void>(qk),
                                      .kv_pool = at_address<void>(kv_pool),
                                      .block_tables = at_address<const std::int32_t>(block_tables),
                                      .sequence_offsets = at_address<const std::int32_t>(sequence_offsets),
                                      .positions = at_address<const std::int32_t>(positions),
                                      .cosine = at_address<const float>(cosine),
                                      .sine = at_address<const float>(sine),
                                      .attended = at_address<void>(attended)},
                at_address<void>(stream));
}

}  // namespace

// Addresses are device addresses; 0 is no tensor. See adaptrt/cuda/state_kernels.h and latent_kernels.h for
// shapes. `states` is (sequences, sequence_offsets, slots, states, slot_stride).
void bind_state_kernels(py::module_& module) {
  module.def("enqueue_causal_convolution", &enqueue_causal_convolution, py::kw_only(), py::arg("states"),
             py::arg("width"), py::arg("stride"), py::arg("taps"), py::arg("weight"), py::arg("bias") = 0,
             py::arg("values"), py::arg("stream"), "A causal convolution with SiLU, in place.");
  module.def("enqueue_gated_convolution", &enqueue_gated_convolution, py::kw_only(), py::arg("dtype"),
             py::arg("states"), py::arg("width"), py::arg("taps"), py::arg("weight"), py::arg("bias") = 0,
             py::arg("input"), py::arg("output"), py::arg("stream"),
             "A causal convolution of gated columns, and its gate.");
  module.def("enqueue_gated_delta", &enqueue_gated_delta, py::kw_only(), py::arg("states"), py::arg("shape"),
             py::arg("stride"), py::arg("qkv"), py::arg("gates"), py::arg("log_decay"), py::arg("time_bias"),
             py::arg("update_scale") = 1.0F, py::arg("output"), py::arg("stream"), "The gated delta rule.");
  module.def("enqueue_selective_scan", &enqueue_selective_scan, py::kw_only(), py::arg("states"),
             py::arg("shape"), py::arg("stride"), py::arg("values"), py::arg("log_decay"),
             py::arg("time_bias"), py::arg("skip"), py::arg("time_min"), py::arg("time_max"),
             py::arg("output"), py::arg("stream"), "Mamba 2's selective scan.");
  module.def("enqueue_gated_rms_norm", &enqueue_gated_rms_norm, py::kw_only(), py::arg("dtype"),
             py::arg("rows"), py::arg("width"), py::arg("group"), py::arg("weight_size"), py::arg("input"),
             py::arg("gate"), py::arg("weight"), py::arg("epsilon"), py::arg("gate_first"), py::arg("output"),
             py::arg("stream"), "An RMS norm of each group, times SiLU of a gate.");
  module.def("enqueue_sigmoid_gate", &enqueue_sigmoid_gate, py::kw_only(), py::arg("dtype"), py::arg("rows"),
             py::arg("width"), py::arg("gate"), py::arg("output"), py::arg("stream"),
             "output *= the sigmoid of a gate.");
  module.def("enqueue_join_queries", &enqueue_join_queries, py::kw_only(), py::arg("dtype"),
             py::arg("tokens"), py::arg("heads"), py::arg("latent_dim"), py::arg("rotary_dim"),
             py::arg("plain_dim"), py::arg("queries"), py::arg("products"), py::arg("rows"), py::arg("norm"),
             py::arg("epsilon"), py::arg("qk"), py::arg("stream"),
             "[q | k] of latent attention: k is the norm of a compressed row.");
  module.def("enqueue_latent_attention", &enqueue_latent_attention, py::kw_only(), py::arg("dtype"),
             py::arg("tokens"), py::arg("sequences"), py::arg("max_blocks"), py::arg("tokens_per_block"),
             py::arg("num_heads"), py::arg("key_dim"), py::arg("rotary_dim"), py::arg("scale"), py::arg("qk"),
             py::arg("kv_pool"), py::arg("block_tables"), py::arg("sequence_offsets"), py::arg("positions"),
             py::arg("cosine"), py::arg("sine"), py::arg("attended"), py::arg("stream"),
             "Causal attention whose values are its keys; neighbouring elements rotate together.");
}

}  // namespace adaptrt::bindings
