#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/program.h"
#include "adaptrt/lora/site_index.h"
#include "bindings.h"
#include "compressed_sizes.h"
#include "kept_object.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

std::size_t bytes_of(const py::buffer_info& info) {
  return static_cast<std::size_t>(info.size * info.itemsize);
}

/// The first byte of a C-contiguous buffer.
const std::byte* data_of(const py::buffer_info& info, std::size_t alignment, const char* what) {
  py::ssize_t expected = info.itemsize;
  for (auto axis = static_cast<std::size_t>(info.ndim); axis-- > 0;) {
    if (info.shape[axis] > 1 && info.strides[axis] != expected) {
      throw py::value_error(std::string(what) + ": the buffer is not contiguous");
    }
    expected *= info.shape[axis];
  }
  if (reinterpret_cast<std::uintptr_t>(info.ptr) % alignment != 0) {
    throw py::value_error(std::string(what) + ": the buffer is not aligned to " + std::to_string(alignment) +
                          " bytes");
  }
  return static_cast<const std::byte*>(info.ptr);
}

PanelMatrix make_panel_matrix(const py::buffer& data, DType dtype, std::int64_t n, std::int64_t k,
                              const Quantization& quantization, std::optional<std::int64_t> exceptions,
                              bool has_rows, bool has_columns) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (n < 0 || k < 0 || n >= kLimit || k >= kLimit) {
    throw py::value_error("PanelMatrix: n and k must lie in [0, 2**31)");
  }
  PanelMatrix matrix{.dtype = dtype, .n = n, .k = k, .quantization = quantization};
  if (exceptions) {
    check_compressed_sizes(n, k, *exceptions);
    matrix.exceptions = *exceptions;
  }
  if (has_rows && (!matrix.is_plain() || !can_have_rows(dtype, n, k))) {
    throw py::value_error("PanelMatrix: " + std::string(name_of(dtype)) + "[" + std::to_string(n) + ", " +
                          std::to_string(k) + "] cannot have rows");
  }
  if (has_columns && (!matrix.is_plain() || has_rows || !can_have_columns(dtype, n, k))) {
    throw py::value_error("PanelMatrix: " + std::string(name_of(dtype)) + "[" + std::to_string(n) + ", " +
                          std::to_string(k) + "] cannot have columns" + (has_rows ? " beside rows" : ""));
  }
  matrix.has_rows = has_rows;
  matrix.has_columns = has_columns;
  const py::buffer_info info = data.request();
  if (bytes_of(info) != matrix.bytes()) {
    throw py::value_error(
        "PanelMatrix: " + std::to_string(bytes_of(info)) + " bytes given, panels of " +
        (exceptions ? "compressed " : "") +
        std::string(quantization.algo == QuantAlgo::kNone ? name_of(dtype) : name_of(quantization.algo)) +
        "[" + std::to_string(n) + ", " + std::to_string(k) + "] take " + std::to_string(matrix.bytes()));
  }
  // Quantised panels have float32 scales, compressed ones the places of exceptions.
  const bool is_plain = quantization.algo == QuantAlgo::kNone && !exceptions;
  matrix.data = data_of(info, is_plain ? size_of(dtype) : sizeof(float), "PanelMatrix");
  matrix.owner = std::make_shared<KeptObject>(data);
  return matrix;
}

NeuronTable make_neuron_table(const py::buffer& data, DType dtype, std::int64_t count, std::int64_t size) {
  if (!can_have_neurons(dtype, count, size) || count < 1 || size < 1) {
    throw py::value_error("NeuronTable: an MLP of " + std::to_string(count) + " and " + std::to_string(size) +
                          " of " + std::string(name_of(dtype)) + " cannot have neurons");
  }
  NeuronTable neurons{.dtype = dtype, .count = count, .size = size};
  const py::buffer_info info = data.request();
  if (bytes_of(info) != neurons.bytes()) {
    throw py::value_error("NeuronTable: " + std::to_string(bytes_of(info)) + " bytes given, " +
                          std::to_string(count) + " neurons of " + std::to_string(size) + " take " +
                          std::to_string(neurons.bytes()));
  }
  neurons.data = data_of(info, size_of(dtype), "NeuronTable");
  neurons.owner = std::make_shared<KeptObject>(data);
  return neurons;
}

/// Panels that some rows of a matrix lie in.
struct PanelSpan {
  std::int64_t first_panel;
  std::size_t begin;  ///< in bytes
  std::size_t end;
  std::int64_t rows;  ///< of these panels
};

py::array_t<float> unpack_rows(const PanelMatrix& matrix, std::int64_t first, std::int64_t last) {
  if (first < 0 || first > last || last > matrix.n) {
    throw py::value_error("PanelMatrix.rows: [" + std::to_string(first) + ", " + std::to_string(last) +
                          ") does not lie within " + std::to_string(matrix.n) + " rows");
  }
  py::array_t<float> rows({last - first, matrix.k});
  float* out = rows.mutable_data();
  const py::gil_scoped_release release;
  for (std::int64_t row = first; row < last; ++row)
    unpack_panel_row(matrix, row, out + (row - first) * matrix.k);
  return rows;
}

PanelSpan span_of_rows(const PanelMatrix& matrix, std::int64_t first, std::int64_t last) {
  if (first < 0 || first >= last || last > matrix.n) {
    throw py::value_error("PanelMatrix: [" + std::to_string(first) + ", " + std::to_string(last) +
                          ") does not lie within " + std::to_string(matrix.n) + " rows");
  }
  const std::int64_t begin = first / kPanelColumns;
  const std::int64_t end = panel_count(last);
  return {begin, matrix.offset(begin),
          end == panel_count(matrix.n) ? matrix.bytes_of_panels() : matrix.offset(end),
          std::min(end * kPanelColumns, matrix.n) - begin * kPanelColumns};
}

std::pair<std::size_t, std::size_t> panels_of(const PanelMatrix& matrix, std::int64_t first,
                                              std::int64_t last) {
  const PanelSpan span = span_of_rows(matrix, first, last);
  return {span.begin, span.end};
}

/// Throws ValueError unless every input is there once.
void check_order(std::span<const std::int32_t> order) {
  std::vector<bool> seen(order.size());
  for (const std::int32_t input : order) {
    const auto at = static_cast<std::size_t>(input);
    if (at >= seen.size() || seen[at])
      throw py::value_error("PanelMatrix.rows_of: not an order of the inputs");
    seen[at] = true;
  }
}

py::array_t<float> unpack_rows_of(const PanelMatrix& matrix, const py::buffer& panels, std::int64_t first,
                                  std::int64_t last,
                                  const std::optional<py::array_t<std::int32_t, py::array::c_style>>& order) {
  const PanelSpan span = span_of_rows(matrix, first, last);
  const py::buffer_info info = panels.request();
  if (bytes_of(info) != span.end - span.begin) {
    throw py::value_error("PanelMatrix.rows_of: " + std::to_string(bytes_of(info)) + " bytes given, " +
                          std::to_string(span.end - span.begin) + " expected");
  }
  if (order.has_value() != matrix.quantization.reordered || (order && order->size() != matrix.k)) {
    throw py::value_error("PanelMatrix.rows_of: an order of the inputs goes with a reordered matrix alone");
  }
  PanelMatrix part{.data = data_of(info, sizeof(float), "PanelMatrix.rows_of"),
                   .dtype = matrix.dtype,
                   .n = span.rows,
                   .k = matrix.k,
                   .quantization = matrix.quantization,
                   .exceptions = matrix.exceptions};
  part.quantization.reordered = false;
  const std::int64_t before = span.first_panel * kPanelColumns;
  py::array_t<float> rows = unpack_rows(part, first - before, last - before);
  if (!order) return rows;
  const std::span<const std::int32_t> inputs{order->data(), static_cast<std::size_t>(matrix.k)};
  check_order(inputs);
  for (std::int64_t row = 0; row < rows.shape(0); ++row) put_in_order(inputs, rows.mutable_data(row, 0));
  return rows;
}

VectorView make_vector_view(const py::buffer& data) {
  const py::buffer_info info = data.request();
  if (bytes_of(info) % sizeof(float) != 0) {
    throw py::value_error("VectorView: " + std::to_string(bytes_of(info)) +
                          " bytes are not whole float32 elements");
  }
  const auto* first = data_of(info, alignof(float), "VectorView");
  return {reinterpret_cast<const float*>(first), static_cast<std::int64_t>(bytes_of(info) / sizeof(float))};
}

LoraModule module_of(std::int64_t id) {
  const auto* info = find_lora_module(id);
  if (info == nullptr) throw ConfigError("there is no LoRA module with id " + std::to_string(id));
  return info->module;
}

void bind_views(py::module_& module) {
  py::class_<PanelMatrix>(module, "PanelMatrix",
                          "A packed W[n, k] in a buffer, which it and its copies keep alive.")
      .def(
          py::init(&make_panel_matrix), py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("n"),
          py::arg("k"), py::arg("quantization") = Quantization{}, py::arg("exceptions") = py::none(),
          py::arg("has_rows") = false, py::arg("has_columns") = false,
          "`exceptions`: of a compressed matrix, the places for them in each panel. Raises ValueError unless "
          "`data` is contiguous and holds exactly panel_bytes(dtype, n, k) or, of a quantised matrix, "
          "quantized_panel_bytes(quantization, n, k), of a compressed one compressed_bytes(n, k, "
          "exceptions); and where `has_rows` is not can_have_rows(dtype, n, k), or `has_columns` not "
          "can_have_columns(dtype, n, k), or both are given.")
      .def_readonly("dtype", &PanelMatrix::dtype)
      .def_readonly("n", &PanelMatrix::n)
      .def_readonly("k", &PanelMatrix::k)
      .def_readonly("quantization", &PanelMatrix::quantization)
      .def_property_readonly("is_compressed",
                             [](const PanelMatrix& matrix) { return matrix.is_compressed(); })
      .def_readonly("has_rows", &PanelMatrix::has_rows)
      .def_readonly("has_columns", &PanelMatrix::has_columns)
      .def_property_readonly("bytes", &PanelMatrix::bytes)
      .def_property_readonly(
          "address", [](const PanelMatrix& matrix) { return reinterpret_cast<std::uintptr_t>(matrix.data); },
          "Of its first byte.")
      .def("panels_of", &panels_of, py::arg("first"), py::arg("last"),
           "(begin, end): the bytes of the panels that W[first:last] lies in.")
      .def_property_readonly(
          "order_bytes",
          [](const PanelMatrix& matrix) {
            const std::size_t end = matrix.bytes();
            const std::size_t size = matrix.quantization.reordered ? matrix.k * sizeof(std::int32_t) : 0;
            return std::pair(end - size, end);
          },
          "(begin, end): the bytes of the order of its inputs, int32; none unless it is reordered.")
      .def("rows_of", &unpack_rows_of, py::arg("panels"), py::arg("first"), py::arg("last"),
           py::arg("order") = py::none(),
           "rows(first, last), from the bytes that panels_of(first, last) says and, of a reordered matrix, "
           "what order_bytes says, wherever they are. Raises ValueError for fewer or more.")
      .def("rows", &unpack_rows, py::arg("first"), py::arg("last"),
           "W[first:last] as float32[last - first, k].");
  py::class_<NeuronTable>(module, "NeuronTable",
                          "Rows of up and columns of down of an MLP with a ReLU's gate, neuron by neuron, in "
                          "a buffer, which it and its copies keep alive; or none.")
      .def(py::init<>())
      .def(py::init(&make_neuron_table), py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("count"),
           py::arg("size"),
           "`count`: of the neurons, `size`: the width of the layer's input. Raises ValueError unless `data` "
           "is contiguous and holds exactly neuron_bytes(dtype, count, size).")
      .def_readonly("count", &NeuronTable::count)
      .def_readonly("size", &NeuronTable::size);
  py::class_<VectorView>(
      module, "VectorView",
      "A float32 vector in a buffer that the engine's storage object keeps alive; or empty.")
      .def(py::init<>())
      .def(py::init(&make_vector_view), py::kw_only(), py::arg("data"),
           "Raises ValueError unless `data` is contiguous, aligned and a whole number of float32.")
      .def_readonly("size", &VectorView::size)
      .def_property_readonly(
          "address", [](const VectorView& vector) { return reinterpret_cast<std::uintptr_t>(vector.data); },
          "Of its first byte.")
      .def(
          "values",
          [](const VectorView& vector) {
            return py::array_t<float>(static_cast<py::ssize_t>(vector.size), vector.data);
          },
          "A copy, float32[size].");
}

void bind_layout(py::module_& module) {
  py::class_<ModuleSizes>(module, "ModuleSizes",
                          "Widths of A's input and B's output, of each of its experts.")
      .def_readonly("in_size", &ModuleSizes::in)
      .def_readonly("out_size", &ModuleSizes::out)
      .def_readonly("experts", &ModuleSizes::experts);
  py::class_<LoraPart>(module, "LoraPart", "A module's share of a linear layer's output.")
      .def(py::init([](std::int64_t id, std::int64_t out_size, std::int64_t first_output,
                       std::int64_t outputs_elsewhere) {
             return LoraPart{module_of(id), out_size, first_output, outputs_elsewhere};
           }),
           py::kw_only(), py::arg("module"), py::arg("out_size"), py::arg("first_output") = 0,
           py::arg("outputs_elsewhere") = 0)
      .def_property_readonly("module", [](const LoraPart& part) { return static_cast<int>(part.module); })
      .def_readonly("out_size", &LoraPart::out_size, "Of one rank.")
      .def_readonly("first_output", &LoraPart::first_output)
      .def_readonly("outputs_elsewhere", &LoraPart::outputs_elsewhere)
      .def_property_readonly("whole_out_size", &LoraPart::whole_out_size, "Rows of adapters' B.");
  py::class_<LoraSite>(module, "LoraSite", "A linear layer whose parts share an input, where adapters act.")
      .def(py::init([](std::int32_t layer, std::int64_t in_size, std::vector<LoraPart> parts,
                       std::int32_t expert, std::int64_t first_input, std::int64_t inputs_elsewhere,
                       bool adds_shifts, std::int32_t experts_for_each, std::int32_t num_shares,
                       std::int32_t share) {
             return LoraSite{.layer = layer,
                             .in_size = in_size,
                             .parts = std::move(parts),
                             .expert = expert,
                             .first_input = first_input,
                             .inputs_elsewhere = inputs_elsewhere,
                             .adds_shifts = adds_shifts,
                             .experts_for_each = experts_for_each,
                             .num_shares = num_shares,
                             .share = share};
           }),
           py::kw_only(), py::arg("layer"), py::arg("in_size"), py::arg("parts"), py::arg("expert") = 0,
           py::arg("first_input") = 0, py::arg("inputs_elsewhere") = 0, py::arg("adds_shifts") = true,
           py::arg("experts_for_each") = 1, py::arg("num_shares") = 1, py::arg("share") = 0)
      .def_readonly("layer", &LoraSite::layer)
      .def_readonly("in_size", &LoraSite::in_size, "Of one rank.")
      .def_readonly("first_input", &LoraSite::first_input)
      .def_readonly("inputs_elsewhere", &LoraSite::inputs_elsewhere)
      .def_readonly("adds_shifts", &LoraSite::adds_shifts)
      .def_property_readonly("whole_in_size", &LoraSite::whole_in_size, "Columns of adapters' A.")
      .def_readonly("parts", &LoraSite::parts)
      .def_readonly("expert", &LoraSite::expert)
      .def_readonly("experts_for_each", &LoraSite::experts_for_each,
                    "Of experts: how many the layer has for each that is on this rank.")
      .def_readonly(
          "num_shares", &LoraSite::num_shares,
          "Of adapters that are fully sharded: the ranks that share A's rows of a layer that is cut by its "
          "outputs, B's of one that is cut by its inputs.")
      .def_readonly("share", &LoraSite::share, "Which of them this rank is.")
      .def(
          "most_rows_of_a",
          [](const LoraSite& site, std::int64_t total_rank) { return site.rows_of_a(total_rank, 0).count; },
          py::arg("total_rank"), "Of A[total_rank, in_size], those that the rank with most of them has.")
      .def(
          "most_rows_of_b",
          [](const LoraSite& site, std::int64_t out_size) { return site.rows_of_b(out_size, 0).count; },
          py::arg("out_size"), "The same of B[out_size, rank].");
  py::class_<LoraLayout>(module, "LoraLayout", "What an engine accepts of adapters.")
      .def(py::init<>(), "Of an engine that was built without LoRA.")
      .def(py::init([](DType dtype, std::int32_t num_layers, std::int32_t max_rank, bool dora_enabled,
                       const std::vector<std::int64_t>& target_modules, std::vector<LoraSite> sites,
                       std::int32_t num_stages, std::int32_t stage, std::int32_t max_extra_tokens,
                       std::vector<std::int32_t> rotary_factors, std::int32_t max_base_positions,
                       std::int32_t num_encoder_layers) {
             LoraLayout layout{dtype, num_layers, max_rank, dora_enabled, {}, std::move(sites)};
             layout.num_stages = num_stages;
             layout.stage = stage;
             layout.max_extra_tokens = max_extra_tokens;
             layout.rotary_factors = std::move(rotary_factors);
             layout.max_base_positions = max_base_positions;
             layout.num_encoder_layers = num_encoder_layers;
             for (const auto id : target_modules) layout.target_modules.push_back(module_of(id));
             return layout;
           }),
           py::kw_only(), py::arg("dtype"), py::arg("num_layers"), py::arg("max_rank"),
           py::arg("dora_enabled"), py::arg("target_modules"), py::arg("sites"), py::arg("num_stages") = 1,
           py::arg("stage") = 0, py::arg("max_extra_tokens") = 0,
           py::arg("rotary_factors") = std::vector<std::int32_t>{}, py::arg("max_base_positions") = 0,
           py::arg("num_encoder_layers") = 0)
      .def_readonly("dtype", &LoraLayout::dtype)
      .def_readonly("num_layers", &LoraLayout::num_layers)
      .def_readonly("max_rank", &LoraLayout::max_rank)
      .def_readonly("dora_enabled", &LoraLayout::dora_enabled)
      .def_readonly("max_extra_tokens", &LoraLayout::max_extra_tokens,
                    "Tokens beyond the vocabulary that an adapter may bring.")
      .def_readonly("rotary_factors", &LoraLayout::rotary_factors,
                    "By which adapters may divide rotary positions; empty: none may.")
      .def_readonly("max_base_positions", &LoraLayout::max_base_positions,
                    "Of the base model, where there are rotary_factors; else 0.")
      .def_readonly("num_encoder_layers", &LoraLayout::num_encoder_layers,
                    "The last of num_layers: those of an encoder before a decoder.")
      .def_property_readonly("target_modules",
                             [](const LoraLayout& layout) {
                               std::vector<int> ids;
                               for (const auto target : layout.target_modules)
                                 ids.push_back(static_cast<int>(target));
                               return ids;
                             })
      .def_readonly("sites", &LoraLayout::sites)
      .def(
          "sizes_of",
          [](const LoraLayout& layout, std::int32_t layer, std::int64_t id) -> std::optional<ModuleSizes> {
            const SiteIndex index(layout);
            const ModulePlace* place = index.find(layer, module_of(id));
            return place == nullptr ? std::nullopt : std::optional(place->sizes);
          },
          py::arg("layer"), py::arg("module"),
          "ModuleSizes, or None of a module that the layer does not have.");
}

void bind_op_enums(py::module_& module) {
  py::native_enum<RowKind>(module, "RowKind", "enum.Enum", "How many rows a buffer has in a step.")
      .value("TOKENS", RowKind::kTokens)
      .value("LOGITS", RowKind::kLogits)
      .value("ENCODER_TOKENS", RowKind::kEncoderTokens)
      .finalize();
  py::native_enum<RopeKind>(module, "RopeKind", "enum.Enum",
                            "How the rotary angles of the positions are made.")
      .value("STATIC", RopeKind::kStatic)
      .value("DYNAMIC", RopeKind::kDynamic)
      .value("LONG", RopeKind::kLong)
      .finalize();
  py::native_enum<LinearEpilogue>(module, "LinearEpilogue", "enum.Enum",
                                  "What a linear op does with its result.")
      .value("STORE", LinearEpilogue::kStore)
      .value("ADD", LinearEpilogue::kAdd)
      .value("SILU_MUL", LinearEpilogue::kSiluMul)
      .value("GELU_MUL", LinearEpilogue::kGeluMul)
      .value("GELU_TANH_MUL", LinearEpilogue::kGeluTanhMul)
      .value("GELU", LinearEpilogue::kGelu)
      .value("GELU_TANH", LinearEpilogue::kGeluTanh)
      .value("RELU", LinearEpilogue::kRelu)
      .value("RELU_MUL", LinearEpilogue::kReluMul)
      .value("RELU_MUL_RELU", LinearEpilogue::kReluMulRelu)
      .value("CLAMPED_SILU_MUL", LinearEpilogue::kClampedSiluMul)
      .finalize();
  py::native_enum<AttentionKind>(module, "AttentionKind", "enum.Enum",
                                 "Which keys the queries of an attention op see.")
      .value("CAUSAL", AttentionKind::kCausal)
      .value("BIDIRECTIONAL", AttentionKind::kBidirectional)
      .finalize();
  py::native_enum<RouterScores>(module, "RouterScores", "enum.Enum",
                                "What a router's logits become before experts are chosen.")
      .value("SOFTMAX", RouterScores::kSoftmax)
      .value("SIGMOID", RouterScores::kSigmoid)
      .value("SOFTMAX_OF_CHOSEN", RouterScores::kSoftmaxOfChosen)
      .finalize();
}

void bind_program_struct(py::module_& module) {
  py::class_<Program>(module, "Program", "A compiled network: ops in order, buffers in one arena, limits.")
      .def(py::init([](DType dtype, std::int64_t vocab_size, std::int32_t num_layers,
                       std::int32_t num_encoder_layers, std::int32_t max_batch_size,
                       std::int32_t max_num_tokens, std::int32_t max_input_len, std::int32_t max_seq_len,
                       std::int32_t max_beam_width, std::int32_t max_encoder_input_len,
                       std::int32_t tokens_per_block, bool int8_kv_cache, std::size_t arena_bytes,
                       std::vector<Buffer> buffers, std::vector<Op> encoder, std::vector<Op> body,
                       std::vector<Op> head, BufferId logits, BufferId hidden, BufferId encoder_output,
                       LoraLayout lora, std::int32_t num_ranks, std::int32_t num_stages, std::int32_t rank) {
             return Program{.dtype = dtype,
                            .vocab_size = vocab_size,
                            .num_layers = num_layers,
                            .num_encoder_layers = num_encoder_layers,
                            .max_batch_size = max_batch_size,
                            .max_num_tokens = max_num_tokens,
                            .max_input_len = max_input_len,
                            .max_seq_len = max_seq_len,
                            .max_beam_width = max_beam_width,
                            .max_encoder_input_len = max_encoder_input_len,
                            .tokens_per_block = tokens_per_block,
                            .int8_kv_cache = int8_kv_cache,
                            .num_ranks = num_ranks,
                            .num_stages = num_stages,
                            .rank = rank,
                            .arena_bytes = arena_bytes,
                            .buffers = std::move(buffers),
                            .encoder = std::move(encoder),
                            .body = std::move(body),
                            .head = std::move(head),
                            .logits = logits,
                            .hidden = hidden,
                            .encoder_output = encoder_output,
                            .lora = std::move(lora)};
           }),
           py::kw_only(), py::arg("dtype"), py::arg("vocab_size"), py::arg("num_layers"),
           py::arg("num_encoder_layers") = 0, py::arg("max_batch_size"), py::arg("max_num_tokens"),
           py::arg("max_input_len"), py::arg("max_seq_len"), py::arg("max_beam_width") = 1,
           py::arg("max_encoder_input_len") = 0, py::arg("tokens_per_block"),
           py::arg("int8_kv_cache") = false, py::arg("arena_bytes"), py::arg("buffers"),
           py::arg("encoder") = std::vector<Op>{}, py::arg("body"), py::arg("head"),
           py::arg("logits") = kNoBuffer, py::arg("hidden") = kNoBuffer,
           py::arg("encoder_output") = kNoBuffer, py::arg("lora") = LoraLayout{}, py::arg("num_ranks") = 1,
           py::arg("num_stages") = 1, py::arg("rank") = 0)
      .def_readonly("num_ranks", &Program::num_ranks)
      .def_readonly("num_stages", &Program::num_stages)
      .def_readonly("rank", &Program::rank)
      .def_readonly("num_encoder_layers", &Program::num_encoder_layers)
      .def_readonly("max_encoder_input_len", &Program::max_encoder_input_len)
      .def_readonly("encoder", &Program::encoder)
      .def_readonly("encoder_output", &Program::encoder_output)
      .def_readonly("dtype", &Program::dtype)
      .def_readonly("vocab_size", &Program::vocab_size)
      .def_readonly("num_layers", &Program::num_layers)
      .def_readonly("max_batch_size", &Program::max_batch_size)
      .def_readonly("max_num_tokens", &Program::max_num_tokens)
      .def_readonly("max_input_len", &Program::max_input_len)
      .def_readonly("max_seq_len", &Program::max_seq_len)
      .def_readonly("max_beam_width", &Program::max_beam_width)
      .def_readonly("tokens_per_block", &Program::tokens_per_block)
      .def_readonly("int8_kv_cache", &Program::int8_kv_cache)
      .def_readonly("arena_bytes", &Program::arena_bytes)
      .def_readonly("buffers", &Program::buffers)
      .def_readonly("body", &Program::body)
      .def_readonly("head", &Program::head)
      .def_readonly("logits", &Program::logits)
      .def_readonly("hidden", &Program::hidden)
      .def_readonly("lora", &Program::lora)
      .def(
          "kv_block_bytes",
          [](Program program, std::optional<bool> int8_kv_cache) {
            program.int8_kv_cache = int8_kv_cache.value_or(program.int8_kv_cache);
            return kv_block_bytes(program);
          },
          py::arg("int8_kv_cache") = py::none(),
          "Bytes of a KV block over all layers; 0: there are none. With `int8_kv_cache`, what they would be "
          "with it or without it.")
      .def(
          "validate", [](const Program& program) { return program.validate().list(); },
          "Everything that is inconsistent; empty when the program can run.");
  module.def("activation_dtype", &activation_dtype, py::arg("weights"),
             "The type of the activations that a linear op reads, for weights of this type.");
}

}  // namespace

void bind_program(py::module_& module) {
  bind_views(module);
  bind_layout(module);
  bind_op_enums(module);
  bind_ops(module);
  bind_program_struct(module);
}

}  // namespace adaptrt::bindings
