#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/program/ops.h"
#include "bindings.h"
#include "buffers.h"
#include "compressed_sizes.h"
#include "gil_safe_object.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// An owner of a buffer's bytes, which can be neither freed nor resized while it lives.
std::shared_ptr<const void> keep_buffer(const py::buffer& data) {
  return std::make_shared<GilSafeObject>(py::memoryview(data));
}

PanelMatrix make_panel_matrix(const py::buffer& data, DType dtype, std::int64_t n, std::int64_t k,
                              const Quantization& quantization, std::optional<std::int64_t> outliers,
                              bool has_rows, bool has_columns) {
  check_matrix_sizes("PanelMatrix", n, k);
  PanelMatrix matrix{.dtype = dtype, .n = n, .k = k, .quantization = quantization};
  if (outliers) {
    check_compressed_sizes(n, k, *outliers);
    matrix.outliers = *outliers;
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
        (outliers ? "compressed " : "") +
        std::string(quantization.algo == QuantAlgo::kNone ? name_of(dtype) : name_of(quantization.algo)) +
        "[" + std::to_string(n) + ", " + std::to_string(k) + "] take " + std::to_string(matrix.bytes()));
  }
  // Quantised panels have float32 scales, compressed ones the places of outliers.
  const bool is_plain = quantization.algo == QuantAlgo::kNone && !outliers;
  matrix.data = data_of(info, "PanelMatrix", is_plain ? size_of(dtype) : sizeof(float));
  matrix.owner = keep_buffer(data);
  return matrix;
}

NeuronTable make_neuron_table(const py::buffer& data, DType dtype, std::int64_t count, std::int64_t size) {
  check_matrix_sizes("NeuronTable", count, size);
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
  neurons.data = data_of(info, "NeuronTable", size_of(dtype));
  neurons.owner = keep_buffer(data);
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
  if (order.has_value() != matrix.quantization.act_order || (order && order->size() != matrix.k)) {
    throw py::value_error(
        "PanelMatrix.rows_of: a matrix with act_order needs an order of the inputs; others have none");
  }
  PanelMatrix part{.data = data_of(info, "PanelMatrix.rows_of", sizeof(float)),
                   .dtype = matrix.dtype,
                   .n = span.rows,
                   .k = matrix.k,
                   .quantization = matrix.quantization,
                   .outliers = matrix.outliers};
  part.quantization.act_order = false;
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
  const auto* first = data_of(info, "VectorView", alignof(float));
  return {reinterpret_cast<const float*>(first), static_cast<std::int64_t>(bytes_of(info) / sizeof(float)),
          keep_buffer(data)};
}

}  // namespace

void bind_weights(py::module_& module) {
  py::class_<PanelMatrix>(module, "PanelMatrix",
                          "A packed W[n, k] in a buffer, which this object and its copies keep alive.")
      .def(py::init(&make_panel_matrix), py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("n"),
           py::arg("k"), py::arg("quantization") = Quantization{}, py::arg("outliers") = py::none(),
           py::arg("has_rows") = false, py::arg("has_columns") = false,
           "outliers: for a compressed matrix, the number of places for outliers in each panel. Raises "
           "ValueError unless `data` is contiguous and has exactly panel_bytes(dtype, n, k) bytes "
           "(quantised: quantized_panel_bytes(quantization, n, k); compressed: compressed_bytes(n, k, "
           "outliers)). Also if has_rows is set and can_have_rows(dtype, n, k) is false, if has_columns is "
           "set and can_have_columns(dtype, n, k) is false, or if both are set.")
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
          "Address of the first byte.")
      .def("panels_of", &panels_of, py::arg("first"), py::arg("last"),
           "Returns (begin, end): the byte range of the panels that contain W[first:last].")
      .def_property_readonly(
          "order_bytes",
          [](const PanelMatrix& matrix) {
            const std::size_t end = matrix.bytes();
            const std::size_t size = matrix.quantization.act_order ? matrix.k * sizeof(std::int32_t) : 0;
            return std::pair(end - size, end);
          },
          "Returns (begin, end): the byte range of the order of the inputs, int32; empty unless the matrix "
          "has act_order.")
      .def("rows_of", &unpack_rows_of, py::arg("panels"), py::arg("first"), py::arg("last"),
           py::arg("order") = py::none(),
           "Returns rows(first, last) from a copy of the bytes panels_of(first, last) and, for a matrix "
           "with act_order, of order_bytes. Raises ValueError for another number of bytes.")
      .def("rows", &unpack_rows, py::arg("first"), py::arg("last"),
           "Returns W[first:last] as float32[last - first, k].");
  py::class_<NeuronTable>(module, "NeuronTable",
                          "Rows of up and columns of down of an MLP with a ReLU gate, stored neuron by "
                          "neuron in a buffer, which this object and its copies keep alive; may be empty.")
      .def(py::init<>())
      .def(py::init(&make_neuron_table), py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("count"),
           py::arg("size"),
           "count: number of neurons. size: width of the layer's input. Raises ValueError unless `data` is "
           "contiguous and has exactly neuron_bytes(dtype, count, size) bytes.")
      .def_readonly("count", &NeuronTable::count)
      .def_readonly("size", &NeuronTable::size);
  py::class_<VectorView>(
      module, "VectorView",
      "A float32 vector in a buffer, which this object and its copies keep alive; may be empty.")
      .def(py::init<>())
      .def(py::init(&make_vector_view), py::kw_only(), py::arg("data"),
           "Raises ValueError unless `data` is contiguous, aligned, and a whole number of float32 elements.")
      .def_readonly("size", &VectorView::size)
      .def_property_readonly(
          "address", [](const VectorView& vector) { return reinterpret_cast<std::uintptr_t>(vector.data); },
          "Address of the first byte.")
      .def(
          "values",
          [](const VectorView& vector) {
            return py::array_t<float>(static_cast<py::ssize_t>(vector.size), vector.data);
          },
          "Returns a copy, float32[size].");
}

}  // namespace adaptrt::bindings
