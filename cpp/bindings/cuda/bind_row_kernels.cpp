#include <cstdint>
#include <string>

#include "adaptrt/cuda/row_kernels.h"
#include "bindings.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// Throws ConfigError for a number that is not a value of an enum whose last value is `last`.
template <typename Enum>
Enum enum_of(int value, Enum last, const char* name) {
  if (value < 0 || value > static_cast<int>(last)) {
    throw ConfigError(std::string(name) + " is " + std::to_string(value) + "; expected 0 to " +
                      std::to_string(static_cast<int>(last)));
  }
  return static_cast<Enum>(value);
}

void enqueue_embedding(int dtype, std::int64_t tokens, std::int64_t width, std::int64_t vocabulary,
                       Address table, Address token_ids, float scale, Address positions, Address position_ids,
                       Address output, Address stream) {
  cuda::enqueue(cuda::Embedding{.dtype = dtype_of(dtype),
                                .tokens = tokens,
                                .width = width,
                                .vocabulary = vocabulary,
                                .table = at_address<const void>(table),
                                .token_ids = at_address<const std::int32_t>(token_ids),
                                .scale = scale,
                                .positions = at_address<const void>(positions),
                                .position_ids = at_address<const std::int32_t>(position_ids),
                                .output = at_address<float>(output)},
                at_address<void>(stream));
}

void enqueue_rms_norm(int dtype, std::int64_t rows, std::int64_t width, Address residual, Address addend,
                      Address row_ids, Address weight, float epsilon, Address output, bool float32_output,
                      Address stream) {
  cuda::enqueue(cuda::RmsNorm{.dtype = dtype_of(dtype),
                              .rows = rows,
                              .width = width,
                              .stream = at_address<float>(residual),
                              .addend = at_address<const void>(addend),
                              .row_ids = at_address<const std::int32_t>(row_ids),
                              .weight = at_address<const float>(weight),
                              .epsilon = epsilon,
                              .output = at_address<void>(output),
                              .float32_output = float32_output},
                at_address<void>(stream));
}

void enqueue_layer_norm(int dtype, std::int64_t rows, std::int64_t width, Address residual, Address addend,
                        Address row_ids, Address weight, Address bias, Address adapter_slots, Address shifts,
                        std::int64_t slot_entries, std::int64_t entry, float epsilon, Address output,
                        bool float32_output, Address stream) {
  cuda::enqueue(cuda::LayerNorm{.dtype = dtype_of(dtype),
                                .rows = rows,
                                .width = width,
                                .stream = at_address<float>(residual),
                                .addend = at_address<const void>(addend),
                                .row_ids = at_address<const std::int32_t>(row_ids),
                                .weight = at_address<const float>(weight),
                                .bias = at_address<const float>(bias),
                                .adapter_slots = at_address<const std::int32_t>(adapter_slots),
                                .shifts = at_address<const std::int64_t>(shifts),
                                .slot_entries = slot_entries,
                                .entry = entry,
                                .epsilon = epsilon,
                                .output = at_address<void>(output),
                                .float32_output = float32_output},
                at_address<void>(stream));
}

void enqueue_added_norm(int dtype, std::int64_t rows, std::int64_t width, Address input, bool float32_input,
                        Address weight, float epsilon, Address sum_scale, Address residual, Address stream) {
  cuda::enqueue(cuda::AddedNorm{.dtype = dtype_of(dtype),
                                .rows = rows,
                                .width = width,
                                .input = at_address<const void>(input),
                                .float32_input = float32_input,
                                .weight = at_address<const float>(weight),
                                .epsilon = epsilon,
                                .sum_scale = at_address<const float>(sum_scale),
                                .stream = at_address<float>(residual)},
                at_address<void>(stream));
}

/// Returns the groups of heads of `size` columns from column `first` on.
cuda::NormGroups heads_at(std::int64_t first, std::int64_t count, std::int64_t size, Address weight) {
  return {.first = first, .count = count, .size = size, .weight = at_address<const float>(weight)};
}

void enqueue_head_norms(int dtype, std::int64_t tokens, std::int64_t stride, std::int64_t num_heads,
                        std::int64_t num_kv_heads, std::int64_t head_size, Address query_weight,
                        Address key_weight, Address value_weight, float epsilon, Address qkv,
                        Address values_from_keys, std::int64_t rotary_half, Address cosine, Address sine,
                        Address stream, bool interleaved) {
  const std::int64_t values = value_weight == 0 || values_from_keys != 0 ? 0 : num_kv_heads;
  cuda::enqueue(cuda::HeadNorms{.dtype = dtype_of(dtype),
                                .tokens = tokens,
                                .stride = stride,
                                .queries = heads_at(0, num_heads, head_size, query_weight),
                                .keys = heads_at(num_heads * head_size, num_kv_heads, head_size, key_weight),
                                .values = heads_at((num_heads + num_kv_heads) * head_size, values, head_size,
                                                   value_weight),
                                .epsilon = epsilon,
                                .qkv = at_address<void>(qkv),
                                .values_from_keys = at_address<void>(values_from_keys),
                                .rotary_half = rotary_half,
                                .interleaved = interleaved,
                                .cosine = at_address<const float>(cosine),
                                .sine = at_address<const float>(sine)},
                at_address<void>(stream));
}

void enqueue_cast(int dtype, std::int64_t elements, Address input, Address output, Address stream) {
  cuda::enqueue(cuda::Cast{.dtype = dtype_of(dtype),
                           .elements = elements,
                           .input = at_address<const float>(input),
                           .output = at_address<void>(output)},
                at_address<void>(stream));
}

void enqueue_addition(int dtype, std::int64_t elements, Address residual, Address addend, Address stream) {
  cuda::enqueue(cuda::Addition{.dtype = dtype_of(dtype),
                               .elements = elements,
                               .stream = at_address<float>(residual),
                               .addend = at_address<const void>(addend)},
                at_address<void>(stream));
}

void enqueue_gated_add(int dtype, std::int64_t tokens, std::int64_t width, Address input, Address gate,
                       Address residual, Address stream) {
  cuda::enqueue(cuda::GatedAdd{.dtype = dtype_of(dtype),
                               .tokens = tokens,
                               .width = width,
                               .input = at_address<const void>(input),
                               .gate = at_address<const float>(gate),
                               .stream = at_address<float>(residual)},
                at_address<void>(stream));
}

void enqueue_gated_columns(int dtype, std::int64_t tokens, std::int64_t width, std::int64_t stride,
                           std::int64_t first_column, int activation, Address gate, Address values,
                           Address output, Address stream) {
  cuda::enqueue(cuda::GatedColumns{.dtype = dtype_of(dtype),
                                   .tokens = tokens,
                                   .width = width,
                                   .stride = stride,
                                   .first_column = first_column,
                                   .activation = enum_of(activation, kLastLinearEpilogue, "activation"),
                                   .gate = at_address<const void>(gate),
                                   .values = at_address<const float>(values),
                                   .output = at_address<void>(output)},
                at_address<void>(stream));
}

void enqueue_rope_table(std::int64_t tokens, std::int64_t half, int kind, float attention_scaling, float base,
                        float factor, std::int32_t original_max_position, Address inverse_frequencies,
                        Address long_inverse_frequencies, Address positions, std::int64_t sequences,
                        Address sequence_offsets, Address prompt_lengths, Address cosine, Address sine,
                        Address stream) {
  cuda::enqueue(cuda::RopeTable{.tokens = tokens,
                                .half = half,
                                .kind = enum_of(kind, RopeKind::kLong, "kind"),
                                .attention_scaling = attention_scaling,
                                .base = base,
                                .factor = factor,
                                .original_max_position = original_max_position,
                                .inverse_frequencies = at_address<const float>(inverse_frequencies),
                                .long_inverse_frequencies = at_address<const float>(long_inverse_frequencies),
                                .positions = at_address<const std::int32_t>(positions),
                                .sequences = sequences,
                                .sequence_offsets = at_address<const std::int32_t>(sequence_offsets),
                                .prompt_lengths = at_address<const std::int32_t>(prompt_lengths),
                                .cosine = at_address<float>(cosine),
                                .sine = at_address<float>(sine)},
                at_address<void>(stream));
}

void enqueue_finish(int dtype, std::int64_t tokens, std::int64_t width, Address product, Address bias,
                    float scale, float softcap, int epilogue, float threshold, Address output,
                    Address stream) {
  cuda::enqueue(cuda::Finish{.dtype = dtype_of(dtype),
                             .tokens = tokens,
                             .width = width,
                             .product = at_address<const void>(product),
                             .bias = at_address<const float>(bias),
                             .scale = scale,
                             .softcap = softcap,
                             .epilogue = enum_of(epilogue, kLastLinearEpilogue, "epilogue"),
                             .threshold = threshold,
                             .output = at_address<void>(output)},
                at_address<void>(stream));
}

void enqueue_xielu(int dtype, std::int64_t elements, float positive, float negative, float linear,
                   float bound, Address input, Address output, Address stream) {
  cuda::enqueue(cuda::Xielu{.dtype = dtype_of(dtype),
                            .elements = elements,
                            .coefficients = {positive, negative, linear, bound},
                            .input = at_address<const void>(input),
                            .output = at_address<void>(output)},
                at_address<void>(stream));
}

void enqueue_finish_logits(std::int64_t elements, Address logits, float scale, float softcap, Address bias,
                           std::int64_t width, Address stream) {
  cuda::enqueue(cuda::FinishLogits{.elements = elements,
                                   .logits = at_address<float>(logits),
                                   .scale = scale,
                                   .softcap = softcap,
                                   .bias = at_address<const float>(bias),
                                   .width = width},
                at_address<void>(stream));
}

void enqueue_finish_padded_logits(std::int64_t rows, std::int64_t width, std::int64_t stride,
                                  std::int64_t logits_stride, Address input, Address logits, float scale,
                                  float softcap, Address bias, Address stream) {
  cuda::enqueue(cuda::FinishPaddedLogits{.rows = rows,
                                         .width = width,
                                         .stride = stride,
                                         .logits_stride = logits_stride,
                                         .input = at_address<const float>(input),
                                         .logits = at_address<float>(logits),
                                         .scale = scale,
                                         .softcap = softcap,
                                         .bias = at_address<const float>(bias)},
                at_address<void>(stream));
}

void enqueue_best_tokens(std::int64_t rows, std::int64_t width, std::int64_t stride, Address logits,
                         Address tokens, Address stream) {
  cuda::enqueue(cuda::BestTokens{.rows = rows,
                                 .width = width,
                                 .stride = stride,
                                 .logits = at_address<const float>(logits),
                                 .tokens = at_address<std::int32_t>(tokens)},
                at_address<void>(stream));
}

void enqueue_take_tokens(std::int64_t tokens, Address best_tokens, Address token_ids, Address stream) {
  cuda::enqueue(cuda::TakeTokens{.tokens = tokens,
                                 .best_tokens = at_address<const std::int32_t>(best_tokens),
                                 .token_ids = at_address<std::int32_t>(token_ids)},
                at_address<void>(stream));
}

void enqueue_find_highest(std::int64_t rows, std::int64_t width, std::int64_t stride, std::int64_t count,
                          Address logits, Address summaries, Address highest, Address stream) {
  cuda::enqueue(cuda::FindHighest{.rows = rows,
                                  .width = width,
                                  .stride = stride,
                                  .count = count,
                                  .logits = at_address<const float>(logits),
                                  .summaries = at_address<RowSummary>(summaries),
                                  .highest = at_address<TokenLogit>(highest)},
                at_address<void>(stream));
}

}  // namespace

// Addresses are device addresses, multiples of 16; 0 is no tensor. See adaptrt/cuda/row_kernels.h for shapes.
void bind_row_kernels(py::module_& module) {
  module.def("enqueue_embedding", &enqueue_embedding, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
             py::arg("width"), py::arg("vocabulary"), py::arg("table"), py::arg("token_ids"),
             py::arg("scale"), py::arg("positions") = 0, py::arg("position_ids") = 0, py::arg("output"),
             py::arg("stream"), "output = table[token_ids] * scale + positions[position_ids], in float32.");
  module.def(
      "enqueue_rms_norm", &enqueue_rms_norm, py::kw_only(), py::arg("dtype"), py::arg("rows"),
      py::arg("width"), py::arg("residual"), py::arg("addend") = 0, py::arg("row_ids") = 0, py::arg("weight"),
      py::arg("epsilon"), py::arg("output"), py::arg("float32_output") = false, py::arg("stream"),
      "residual += addend, then output = its RMS norm. With row_ids, output is the norm of these rows, "
      "and residual does not change.");
  module.def("enqueue_layer_norm", &enqueue_layer_norm, py::kw_only(), py::arg("dtype"), py::arg("rows"),
             py::arg("width"), py::arg("residual"), py::arg("addend") = 0, py::arg("row_ids") = 0,
             py::arg("weight"), py::arg("bias") = 0, py::arg("adapter_slots") = 0, py::arg("shifts") = 0,
             py::arg("slot_entries") = 0, py::arg("entry") = 0, py::arg("epsilon"), py::arg("output"),
             py::arg("float32_output") = false, py::arg("stream"),
             "As enqueue_rms_norm, for a layer norm. shifts: int64 [slots, slot_entries], addresses of "
             "float32[width] that are added to the bias, or 0.");
  module.def("enqueue_added_norm", &enqueue_added_norm, py::kw_only(), py::arg("dtype"), py::arg("rows"),
             py::arg("width"), py::arg("input"), py::arg("float32_input") = false, py::arg("weight"),
             py::arg("epsilon"), py::arg("sum_scale") = 0, py::arg("residual"), py::arg("stream"),
             "residual += the RMS norm of input; then it is multiplied by sum_scale.");
  module.def(
      "enqueue_head_norms", &enqueue_head_norms, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
      py::arg("stride"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_size"),
      py::arg("query_weight"), py::arg("key_weight"), py::arg("value_weight") = 0, py::arg("epsilon"),
      py::arg("qkv"), py::arg("values_from_keys") = 0, py::arg("rotary_half") = 0, py::arg("cosine") = 0,
      py::arg("sine") = 0, py::arg("stream"), py::arg("interleaved") = false,
      "RMS norms of each head of q and k, and of v with value_weight, in place. With rotary_half, heads "
      "are rotated first; if interleaved, neighbouring elements together. values_from_keys [tokens, stride]: "
      "gets the norms of k as values, in its "
      "first columns.");
  module.def("enqueue_cast", &enqueue_cast, py::kw_only(), py::arg("dtype"), py::arg("elements"),
             py::arg("input"), py::arg("output"), py::arg("stream"), "output = input, rounded to dtype.");
  module.def("enqueue_addition", &enqueue_addition, py::kw_only(), py::arg("dtype"), py::arg("elements"),
             py::arg("residual"), py::arg("addend"), py::arg("stream"), "residual += addend, in float32.");
  module.def("enqueue_gated_add", &enqueue_gated_add, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
             py::arg("width"), py::arg("input"), py::arg("gate"), py::arg("residual"), py::arg("stream"),
             "residual += sigmoid(gate) * input, row by row.");
  module.def("enqueue_gated_columns", &enqueue_gated_columns, py::kw_only(), py::arg("dtype"),
             py::arg("tokens"), py::arg("width"), py::arg("stride"), py::arg("first_column"),
             py::arg("activation"), py::arg("gate"), py::arg("values"), py::arg("output"), py::arg("stream"),
             "output = activation(gate) * columns of values. activation: a value of LinearEpilogue.");
  module.def("enqueue_rope_table", &enqueue_rope_table, py::kw_only(), py::arg("tokens"), py::arg("half"),
             py::arg("kind"), py::arg("attention_scaling") = 1.0F, py::arg("base") = 10000.0F,
             py::arg("factor") = 1.0F, py::arg("original_max_position") = 0, py::arg("inverse_frequencies"),
             py::arg("long_inverse_frequencies") = 0, py::arg("positions"), py::arg("sequences") = 0,
             py::arg("sequence_offsets") = 0, py::arg("prompt_lengths") = 0, py::arg("cosine"),
             py::arg("sine"), py::arg("stream"),
             "cosine and sine of the rotary angles. kind: a value of RopeKind.");
  module.def("enqueue_finish", &enqueue_finish, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
             py::arg("width"), py::arg("product"), py::arg("bias") = 0, py::arg("scale") = 1.0F,
             py::arg("softcap") = 0.0F, py::arg("epilogue"), py::arg("threshold") = 0.0F, py::arg("output"),
             py::arg("stream"),
             "Bias, scale, softcap and epilogue of a linear layer. epilogue: a value of LinearEpilogue.");
  module.def(
      "enqueue_xielu", &enqueue_xielu, py::kw_only(), py::arg("dtype"), py::arg("elements"),
      py::arg("positive"), py::arg("negative"), py::arg("linear"), py::arg("bound"), py::arg("input"),
      py::arg("output"), py::arg("stream"),
      "output = positive x^2 + linear x for x > 0, else negative (expm1(min(x, bound)) - x) + linear x.");
  module.def("enqueue_finish_logits", &enqueue_finish_logits, py::kw_only(), py::arg("elements"),
             py::arg("logits"), py::arg("scale") = 1.0F, py::arg("softcap") = 0.0F, py::arg("bias") = 0,
             py::arg("width") = 0, py::arg("stream"),
             "Bias, scale and softcap of float32 logits, in place. width: of a row; read with a bias.");
  module.def(
      "enqueue_finish_padded_logits", &enqueue_finish_padded_logits, py::kw_only(), py::arg("rows"),
      py::arg("width"), py::arg("stride"), py::arg("logits_stride"), py::arg("input"), py::arg("logits"),
      py::arg("scale") = 1.0F, py::arg("softcap") = 0.0F, py::arg("bias") = 0, py::arg("stream"),
      "As enqueue_finish_logits, from the first width values of rows of input [rows, stride] to those of "
      "logits [rows, logits_stride].");
  module.def("enqueue_best_tokens", &enqueue_best_tokens, py::kw_only(), py::arg("rows"), py::arg("width"),
             py::arg("stride"), py::arg("logits"), py::arg("tokens"), py::arg("stream"),
             "tokens = the index of each row's largest logit, the smallest of equal ones.");
  module.def("enqueue_take_tokens", &enqueue_take_tokens, py::kw_only(), py::arg("tokens"),
             py::arg("best_tokens"), py::arg("token_ids"), py::arg("stream"),
             "token_ids of -1 - r = best_tokens[r], or 0 if that is negative. Other ids stay as they are.");
  module.def(
      "enqueue_find_highest", &enqueue_find_highest, py::kw_only(), py::arg("rows"), py::arg("width"),
      py::arg("stride"), py::arg("count"), py::arg("logits"), py::arg("summaries"), py::arg("highest"),
      py::arg("stream"),
      "highest [rows, count] = each row's highest logits, as pairs (float32, int32 token). summaries "
      "[rows]: float64 sum of exponentials, float32 max and min, int32 best token, and 4 unused bytes.");
}

}  // namespace adaptrt::bindings
