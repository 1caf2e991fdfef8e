#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "adaptrt/cuda/adapted_embedding.h"
#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/new_token_logits.h"
#include "bindings.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

using cuda::LoraKernel;

std::unique_ptr<LoraKernel> make_lora_kernel(int dtype, std::int32_t layer,
                                             std::vector<std::int32_t> module_ids,
                                             std::vector<std::int32_t> out_sizes, std::int32_t max_rank,
                                             bool dora, std::int64_t many_tokens_from,
                                             std::int64_t decode_tokens, std::vector<std::int64_t> entries,
                                             std::int32_t logits_stride) {
  return std::make_unique<LoraKernel>(LoraKernel::Config{.dtype = dtype_of(dtype),
                                                         .layer = layer,
                                                         .module_ids = std::move(module_ids),
                                                         .out_sizes = std::move(out_sizes),
                                                         .max_rank = max_rank,
                                                         .dora = dora,
                                                         .many_tokens_from = many_tokens_from,
                                                         .decode_tokens = decode_tokens,
                                                         .entries = std::move(entries),
                                                         .logits_stride = logits_stride});
}

void enqueue_lora(const LoraKernel& kernel, std::int64_t tokens, std::int64_t in_size, std::int64_t sequences,
                  std::int64_t layers, const std::vector<Address>& inputs,
                  const std::vector<Address>& outputs, Address workspace, Address stream, Address shifts) {
  check_addresses(inputs, 6, "x, base, sequence_offsets, adapter_slots, ranks, pointers");
  check_addresses(outputs, 1, "y");
  kernel.enqueue({.tokens = tokens, .in = in_size, .sequences = sequences, .layers = layers},
                 {.x = at_address<const void>(inputs[0]),
                  .base = at_address<const void>(inputs[1]),
                  .sequence_offsets = at_address<const std::int32_t>(inputs[2]),
                  .adapter_slots = at_address<const std::int32_t>(inputs[3]),
                  .ranks = at_address<const std::int32_t>(inputs[4]),
                  .pointers = at_address<const std::int64_t>(inputs[5]),
                  .shifts = at_address<const std::int64_t>(shifts)},
                 at_address<void>(outputs[0]), at_address<void>(workspace), at_address<void>(stream));
}

void enqueue_adapted_embedding(int dtype, std::int64_t tokens, std::int64_t width, Address table,
                               Address token_ids, float scale, Address output, std::int64_t vocabulary,
                               std::int64_t layers, std::int64_t new_tokens_entry, std::int32_t max_rank,
                               bool dora, Address adapter_slots, Address ranks, Address pointers,
                               Address shifts, Address stream) {
  cuda::enqueue(cuda::AdaptedEmbedding{.embedding = {.dtype = dtype_of(dtype),
                                                     .tokens = tokens,
                                                     .width = width,
                                                     .vocabulary = vocabulary,
                                                     .table = at_address<const void>(table),
                                                     .token_ids = at_address<const std::int32_t>(token_ids),
                                                     .scale = scale,
                                                     .output = at_address<float>(output)},
                                       .layers = layers,
                                       .new_tokens_entry = new_tokens_entry,
                                       .max_rank = max_rank,
                                       .dora = dora,
                                       .adapter_slots = at_address<const std::int32_t>(adapter_slots),
                                       .ranks = at_address<const std::int32_t>(ranks),
                                       .pointers = at_address<const std::int64_t>(pointers),
                                       .shifts = at_address<const std::int64_t>(shifts)},
                at_address<void>(stream));
}

void enqueue_new_token_logits(int dtype, std::int64_t rows, std::int64_t width, std::int64_t vocabulary,
                              std::int64_t max_tokens, std::int64_t entry, std::int64_t slot_entries,
                              Address x, Address adapter_slots, Address ranks, Address pointers, float scale,
                              float softcap, Address logits, Address stream) {
  cuda::enqueue(cuda::NewTokenLogits{.dtype = dtype_of(dtype),
                                     .rows = rows,
                                     .width = width,
                                     .vocabulary = vocabulary,
                                     .max_tokens = max_tokens,
                                     .entry = entry,
                                     .slot_entries = slot_entries,
                                     .x = at_address<const void>(x),
                                     .adapter_slots = at_address<const std::int32_t>(adapter_slots),
                                     .ranks = at_address<const std::int32_t>(ranks),
                                     .pointers = at_address<const std::int64_t>(pointers),
                                     .scale = scale,
                                     .softcap = softcap,
                                     .logits = at_address<float>(logits)},
                at_address<void>(stream));
}

}  // namespace

void bind_lora_kernel(py::module_& module) {
  module.def("enqueue_adapted_embedding", &enqueue_adapted_embedding, py::kw_only(), py::arg("dtype"),
             py::arg("tokens"), py::arg("width"), py::arg("table"), py::arg("token_ids"), py::arg("scale"),
             py::arg("output"), py::arg("vocabulary"), py::arg("layers"),
             py::arg("new_tokens_entry") = cuda::AdaptedEmbedding::kNoNewTokens, py::arg("max_rank"),
             py::arg("dora"), py::arg("adapter_slots"), py::arg("ranks"), py::arg("pointers"),
             py::arg("shifts"), py::arg("stream"),
             "Writes the rows of tokens again whose adapter changes the embedding: "
             "((table[id] + B A[:, id]) * magnitude + shift) * scale; and rows of tokens that it adds: "
             "B[:, id - vocabulary] * scale.");
  module.def("enqueue_new_token_logits", &enqueue_new_token_logits, py::kw_only(), py::arg("dtype"),
             py::arg("rows"), py::arg("width"), py::arg("vocabulary"), py::arg("max_tokens"),
             py::arg("entry"), py::arg("slot_entries"), py::arg("x"), py::arg("adapter_slots"),
             py::arg("ranks"), py::arg("pointers"), py::arg("scale") = 1.0F, py::arg("softcap") = 0.0F,
             py::arg("logits"), py::arg("stream"),
             "Columns of logits [rows, vocabulary + max_tokens] after the vocabulary: x A^T of each row's "
             "adapter, scaled, with the soft cap.");
  // Local, since the tests have another module with this class.
  py::class_<LoraKernel>(
      module, "LoraKernel", py::module_local(),
      "Kernel of the plugins Lora and Dora. A token's result does not depend on the step's other tokens.")
      .def(py::init(&make_lora_kernel), py::arg("dtype"), py::arg("layer"), py::arg("module_ids"),
           py::arg("out_sizes"), py::arg("max_rank"), py::arg("dora"), py::kw_only(),
           py::arg("many_tokens_from") = LoraKernel::kManyTokensFrom,
           py::arg("decode_tokens") = LoraKernel::kDecodeTokens,
           py::arg("entries") = std::vector<std::int64_t>{}, py::arg("logits_stride") = 0,
           "dtype: a value of DType, float16 or bfloat16. The other arguments are the plugin's attributes, "
           "and whether magnitudes are used. Steps of at least many_tokens_from tokens use larger tiles, "
           "and shorter steps of up to decode_tokens tokens use kernels for decode steps, with the same "
           "bits. entries: of each part in the tables, if not those of its layer and module. logits_stride: "
           "above 0, y is float32 [tokens, "
           "logits_stride] and also base. Raises ConfigError.")
      .def("workspace_bytes", &LoraKernel::workspace_bytes, py::arg("max_tokens"),
           "Bytes of workspace that enqueue needs for up to max_tokens tokens.")
      .def("enqueue", &enqueue_lora, py::arg("tokens"), py::arg("in_size"), py::arg("sequences"),
           py::arg("layers"), py::arg("inputs"), py::arg("outputs"), py::arg("workspace"), py::arg("stream"),
           py::kw_only(), py::arg("shifts") = Address{0},
           "Enqueues two launches in a stream. Addresses are device addresses, in the order of the plugin's "
           "definition. shifts: int64 [slots, layers, modules], addresses of float32[out] that are added "
           "after the magnitudes, or 0; 0 if no adapter has any. Raises ConfigError for invalid sizes, and "
           "StepError if CUDA reports an error.");
}

}  // namespace adaptrt::bindings
