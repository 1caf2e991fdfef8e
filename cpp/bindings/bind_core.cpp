#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/convert.h"
#include "adaptrt/core/dtype.h"
#include "adaptrt/core/element_scan.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/neuron_table.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/core/quantized_panels.h"
#include "bindings.h"
#include "buffers.h"
#include "compressed_sizes.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// A two-dimensional buffer of rows, its elements in the raw bits of `dtype`.
struct Rows {
  py::buffer_info info;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
};

Rows rows_of(const py::buffer& buffer, DType dtype) {
  Rows result{buffer.request(), 0, 0, 0};
  const auto size = static_cast<py::ssize_t>(size_of(dtype));
  const auto& info = result.info;
  if (info.ndim != 2 || info.itemsize != size || info.strides[1] != size || info.strides[0] % size != 0) {
    throw py::value_error("expected a two-dimensional array of " + std::string(name_of(dtype)) +
                          " whose rows are contiguous");
  }
  result.rows = info.shape[0];
  result.columns = info.shape[1];
  result.stride = info.strides[0] / size;
  return result;
}

void pack(const py::buffer& panels, DType dtype, std::int64_t n, std::int64_t k, std::int64_t first_row,
          const py::buffer& source, DType source_dtype) {
  const Rows rows = rows_of(source, source_dtype);
  const py::buffer_info out = panels.request(true);
  check_matrix_sizes("pack_panels", n, k);
  if (first_row < 0 || first_row > n || rows.columns != k || rows.rows > n - first_row) {
    throw py::value_error("pack_panels: the source's rows do not lie within the matrix");
  }
  if (bytes_of(out) < panel_bytes(dtype, n, k)) {
    throw py::value_error("pack_panels: the destination is smaller than panel_bytes");
  }
  std::byte* to = data_of(out, "pack_panels: the destination");
  const py::gil_scoped_release release;
  pack_panels(to, dtype, n, k, first_row, rows.rows, static_cast<const std::byte*>(rows.info.ptr),
              source_dtype, rows.stride);
}

Quantization make_quantization(QuantAlgo algo, std::int64_t group_size, bool zero_points, DType scale_type,
                               WeightCode code, DType value_type, std::int32_t bits, bool act_order,
                               bool minimums) {
  if (bits < 2 || bits > 4) throw py::value_error("Quantization: bits must be 2, 3 or 4");
  const std::int64_t together = packed_inputs(bits);
  if (group_size < 0 || group_size % together != 0) {
    throw py::value_error("Quantization: group_size must be a multiple of " + std::to_string(together));
  }
  return {.algo = algo,
          .group_size = group_size,
          .zero_points = zero_points,
          .minimums = minimums,
          .scale_type = scale_type,
          .code = code,
          .value_type = value_type,
          .bits = bits,
          .act_order = act_order};
}

/// The bytes of a contiguous buffer that must hold exactly `size` of them.
const std::byte* exact_bytes(const py::buffer_info& info, std::int64_t size, const char* what) {
  const std::string name = "pack_quantized_panels: " + std::string(what);
  if (std::cmp_not_equal(bytes_of(info), size)) {
    throw py::value_error(name + " holds " + std::to_string(bytes_of(info)) + " bytes, not " +
                          std::to_string(size));
  }
  return data_of(info, name.c_str());
}

void pack_quantized(const py::buffer& panels, const Quantization& quantization, std::int64_t n,
                    std::int64_t k, std::int64_t first_row, std::int64_t rows, const py::buffer& weights,
                    const py::array_t<float, py::array::c_style>& scales,
                    const std::optional<py::buffer>& zeros,
                    const std::optional<py::array_t<float, py::array::c_style>>& minimums) {
  check_matrix_sizes("pack_quantized_panels", n, k);
  if (first_row < 0 || first_row > n || rows < 0 || rows > n - first_row ||
      quantization.algo == QuantAlgo::kNone || zeros.has_value() != quantization.zero_points ||
      minimums.has_value() != quantization.minimums ||
      (quantization.bits != 4 && k % packed_inputs(quantization.bits) != 0)) {
    throw py::value_error("pack_quantized_panels: the rows are not of a matrix that is quantised so");
  }
  const std::int64_t groups = rows * group_count(quantization, k);
  const std::int64_t row_bytes = has_few_bits(quantization.algo) ? (k + 1) / 2 : k;
  const py::buffer_info weights_info = weights.request();
  const py::buffer_info zeros_info = zeros ? zeros->request() : py::buffer_info{};
  const py::buffer_info out = panels.request(true);
  if (scales.size() != groups || (minimums && minimums->size() != groups))
    throw py::value_error("pack_quantized_panels: a scale is needed for each group, and a minimum if any");
  const QuantizedRows source{
      exact_bytes(weights_info, rows * row_bytes, "weights"), scales.data(),
      zeros ? reinterpret_cast<const std::uint8_t*>(exact_bytes(zeros_info, groups, "zeros")) : nullptr,
      minimums ? minimums->data() : nullptr};
  if (bytes_of(out) < panel_bytes(quantization, DType::kFloat32, n, k)) {
    throw py::value_error("pack_quantized_panels: the destination is smaller than panel_bytes");
  }
  std::byte* to = data_of(out, "pack_quantized_panels: the destination");
  const py::gil_scoped_release release;
  pack_quantized_panels(to, quantization, n, k, first_row, rows, source);
}

void pack_order(const py::buffer& behind, const Quantization& quantization, std::int64_t n, std::int64_t k,
                const py::array_t<std::int32_t, py::array::c_style>& order) {
  const py::buffer_info out = behind.request(true);
  check_matrix_sizes("pack_permutation", n, k);
  const PanelMatrix matrix{.n = n, .k = k, .quantization = quantization};
  if (!quantization.act_order || order.size() != k ||
      bytes_of(out) != matrix.bytes() - matrix.bytes_of_panels()) {
    throw py::value_error(
        "pack_permutation: the bytes or the permutation are not those of a matrix with act_order");
  }
  pack_permutation(data_of(out, "pack_permutation"), quantization, n, k, order.data());
}

/// Throws ValueError for a matrix that cannot be compressed.
std::size_t checked_compressed_bytes(std::int64_t n, std::int64_t k, std::int64_t outliers) {
  check_compressed_sizes(n, k, outliers);
  return compressed_bytes(n, k, outliers);
}

/// The bytes of bfloat16 panels of W[n, k].
const std::byte* bfloat16_panels(const py::buffer_info& info, std::int64_t n, std::int64_t k) {
  if (bytes_of(info) != panel_bytes(DType::kBFloat16, n, k)) {
    throw py::value_error("expected " + std::to_string(panel_bytes(DType::kBFloat16, n, k)) +
                          " bytes of bfloat16 panels, not " + std::to_string(bytes_of(info)));
  }
  return data_of(info, "bfloat16 panels");
}

std::int64_t max_outliers(const py::buffer& panels, std::int64_t n, std::int64_t k) {
  check_compressed_sizes(n, k, 0);
  const py::buffer_info info = panels.request();
  const std::byte* from = bfloat16_panels(info, n, k);
  const py::gil_scoped_release release;
  std::int64_t most = 0;
  for (std::int64_t panel = 0; panel < n / kPanelColumns; ++panel) {
    most = std::max(most, count_outliers(from + panel_offset(DType::kBFloat16, k, panel), k));
  }
  return most;
}

void compress(const py::buffer& out, const py::buffer& panels, std::int64_t n, std::int64_t k,
              std::int64_t outliers) {
  const std::size_t bytes = checked_compressed_bytes(n, k, outliers);
  const py::buffer_info source = panels.request();
  const py::buffer_info destination = out.request(true);
  const std::byte* from = bfloat16_panels(source, n, k);
  if (bytes_of(destination) != bytes) {
    throw py::value_error("compress_panels: the destination must have " + std::to_string(bytes) + " bytes");
  }
  if (max_outliers(panels, n, k) > outliers) {
    throw py::value_error("compress_panels: there are more outliers than places for them");
  }
  std::byte* to = data_of(destination, "compress_panels: the destination");
  const py::gil_scoped_release release;
  const PanelMatrix made{.dtype = DType::kBFloat16, .n = n, .k = k, .outliers = outliers};
  for (std::int64_t panel = 0; panel < panel_count(n); ++panel) {
    const std::byte* plain = from + panel_offset(DType::kBFloat16, k, panel);
    if (made.is_compressed(panel)) {
      compress_panel(plain, k, outliers, to + made.offset(panel));
    } else {
      std::memcpy(to + made.offset(panel), plain, panel_bytes(DType::kBFloat16, panel_width(n, panel), k));
    }
  }
}

py::array_t<float> unpack(const py::buffer& panels, DType dtype, std::int64_t n, std::int64_t k) {
  const py::buffer_info in = panels.request();
  check_matrix_sizes("unpack_panels", n, k);
  if (bytes_of(in) < panel_bytes(dtype, n, k)) {
    throw py::value_error("unpack_panels: the source is smaller than panel_bytes");
  }
  py::array_t<float> result({n, k});
  const PanelMatrix matrix{data_of(in, "unpack_panels: the source"), dtype, n, k};
  float* out = result.mutable_data();
  const py::gil_scoped_release release;
  for (std::int64_t row = 0; row < n; ++row) unpack_panel_row(matrix, row, out + row * k);
  return result;
}

/// The elements of a contiguous array, which holds them in the raw bits of `dtype`.
const std::byte* elements_of(const py::array& array, DType dtype) {
  if ((array.flags() & py::array::c_style) == 0 ||
      array.itemsize() != static_cast<py::ssize_t>(size_of(dtype))) {
    throw py::value_error("expected a contiguous array of " + std::string(name_of(dtype)));
  }
  return static_cast<const std::byte*>(array.data());
}

bool scale(py::array& out, DType dtype, const py::array& source, DType source_dtype, float factor) {
  static_cast<void>(elements_of(out, dtype));
  const std::byte* from = elements_of(source, source_dtype);
  if (out.size() != source.size()) throw py::value_error("scale_elements: the arrays differ in size");
  auto* to = static_cast<std::byte*>(out.mutable_data());
  const auto count = static_cast<std::size_t>(source.size());
  const py::gil_scoped_release release;
  constexpr std::size_t kBlock = 8192;  // stays in a core's cache between both passes
  bool is_finite = true;
  for (std::size_t done = 0; done < count; done += kBlock) {
    const std::size_t elements = std::min(kBlock, count - done);
    std::byte* block = to + done * size_of(dtype);
    const std::byte* source_block = from + done * size_of(source_dtype);
    if (factor == 1.0F) {
      convert_elements(block, dtype, source_block, source_dtype, elements);
    } else {
      scale_elements(block, dtype, source_block, source_dtype, factor, elements);
    }
    is_finite = is_finite && !find_not_finite(block, dtype, elements, DType::kFloat32);
  }
  return is_finite;
}

bool all_finite(const py::array& array, DType dtype) {
  const std::byte* data = elements_of(array, dtype);
  const auto count = static_cast<std::size_t>(array.size());
  const py::gil_scoped_release release;
  return !find_not_finite(data, dtype, count, DType::kFloat32);
}

}  // namespace

void bind_core(py::module_& module) {
  py::native_enum<DType>(module, "DType", "enum.Enum", "Element types of weights, adapters and the KV cache.")
      .value("FLOAT32", DType::kFloat32)
      .value("FLOAT16", DType::kFloat16)
      .value("BFLOAT16", DType::kBFloat16)
      .finalize();
  module.def("dtype_name", py::overload_cast<DType>(&name_of), py::arg("dtype"),
             "'float32', 'float16' or 'bfloat16'.");
  module.def(
      "dtype_from_name",
      [](const std::string& name) {
        const auto dtype = dtype_from_name(name);
        if (!dtype) {
          throw ConfigError("dtype '" + name + "' is unknown; accepted: float32, float16, bfloat16");
        }
        return *dtype;
      },
      py::arg("name"),
      "Returns the DType of a name; the inverse of dtype_name. Raises ConfigError for an unknown name.");
  module.def("scale_elements", &scale, py::arg("out"), py::arg("dtype"), py::arg("source"),
             py::arg("source_dtype"), py::arg("scale"),
             "Writes source * scale to `out`, multiplied in float32 and rounded to nearest even. Both are "
             "contiguous arrays of the same size, with elements in the raw bits of their DType. Returns true "
             "if no written element is infinite or NaN.");
  module.def("all_finite", &all_finite, py::arg("array"), py::arg("dtype"),
             "True if no element of a contiguous array, in the raw bits of `dtype`, is infinite or NaN.");
  module.def("panel_bytes", py::overload_cast<DType, std::int64_t, std::int64_t>(&panel_bytes),
             py::arg("dtype"), py::arg("n"), py::arg("k"), "Bytes of a packed weight W[n, k].");
  module.def("pack_panels", &pack, py::arg("panels"), py::arg("dtype"), py::arg("n"), py::arg("k"),
             py::arg("first_row"), py::arg("source"), py::arg("source_dtype"),
             "Packs rows first_row .. first_row + len(source) of W[n, k] into `panels`, a writable buffer.");
  py::native_enum<QuantAlgo>(module, "QuantAlgo", "enum.Enum",
                             "Storage and multiplication of a matrix's weights, with TensorRT-LLM's names.")
      .value("NONE", QuantAlgo::kNone)
      .value("W8A16", QuantAlgo::kW8A16)
      .value("W8A8", QuantAlgo::kW8A8)
      .value("W4A16", QuantAlgo::kW4A16)
      .value("W4A8", QuantAlgo::kW4A8)
      .finalize();
  py::native_enum<WeightCode>(module, "WeightCode", "enum.Enum", "Meaning of a weight's bits.")
      .value("INTEGER", WeightCode::kInteger)
      .value("NF4", WeightCode::kNF4)
      .value("FP4", WeightCode::kFP4)
      .value("E4M3", WeightCode::kE4M3)
      .value("E2M1", WeightCode::kE2M1)
      .value("LLM_INT8", WeightCode::kLLMInt8)
      .finalize();
  module.def(
      "code_table",
      [](WeightCode code) {
        const auto& table = code_table(code);
        return py::array_t<float>(static_cast<py::ssize_t>(table.size()), table.data());
      },
      py::arg("code"), "Values of a code, float32 [16]; u - 8 for INTEGER and for codes of eight bits.");
  py::class_<Quantization>(module, "Quantization", "Quantisation of a matrix.")
      .def(py::init(&make_quantization), py::kw_only(), py::arg("algo"), py::arg("group_size") = 0,
           py::arg("zero_points") = false, py::arg("scale_type") = DType::kBFloat16,
           py::arg("code") = WeightCode::kInteger, py::arg("value_type") = DType::kFloat32,
           py::arg("bits") = 4, py::arg("act_order") = false, py::arg("minimums") = false,
           "Raises ValueError for group sizes and bits that the kernels do not support.")
      .def_readonly("algo", &Quantization::algo)
      .def_readonly("group_size", &Quantization::group_size,
                    "Number of inputs that share a scale; 0: all of them.")
      .def_readonly("zero_points", &Quantization::zero_points)
      .def_readonly("minimums", &Quantization::minimums, "True if each group has a minimum.")
      .def_readonly("scale_type", &Quantization::scale_type,
                    "Type of the scales of few bits, of codes, and of W8A16 in groups.")
      .def_readonly("code", &Quantization::code, "Meaning of the bits.")
      .def_readonly("value_type", &Quantization::value_type,
                    "Type to which a code's values times scales are rounded.")
      .def_readonly("bits", &Quantization::bits, "Bits of W4A16 and W4A8: 4; for integers also 2 or 3.")
      .def_readonly("act_order", &Quantization::act_order,
                    "True if an order of the inputs follows the panels; for integers of W4A16 and W8A16.");
  module.def(
      "quantized_panel_bytes",
      [](const Quantization& quantization, std::int64_t n, std::int64_t k) {
        return panel_bytes(quantization, DType::kFloat32, n, k);
      },
      py::arg("quantization"), py::arg("n"), py::arg("k"), "Bytes of a packed quantised weight W[n, k].");
  module.def("pack_quantized_panels", &pack_quantized, py::arg("panels"), py::arg("quantization"),
             py::arg("n"), py::arg("k"), py::arg("first_row"), py::arg("rows"), py::arg("weights"),
             py::arg("scales"), py::arg("zeros") = py::none(), py::arg("minimums") = py::none(),
             "Packs quantised rows of W[n, k] into `panels`, a writable buffer. `weights` are stored as in "
             "checkpoints. Each group of each row has a float32 scale, which is rounded to the type of the "
             "scales, and with zero points a uint8 zero, or a float32 minimum that is rounded alike. Raises "
             "CheckpointError for integers that do not fit "
             "in 2 or 3 bits.");
  module.def(
      "pack_permutation", &pack_order, py::arg("behind"), py::arg("quantization"), py::arg("n"), py::arg("k"),
      py::arg("order"),
      "Writes the permutation of the inputs of a W[n, k] with act_order, int32 [k], to `behind`, the bytes "
      "after its panels: input i of the panels is input order[i] of W.");
  module.attr("LLM_INT8_FACTOR") = kLLMInt8Factor;
  module.def("can_have_rows", &can_have_rows, py::arg("dtype"), py::arg("n"), py::arg("k"),
             "True if a plain W[n, k] can be stored output by output: it must consist of whole panels, and "
             "of groups of four bytes.");
  module.def("can_have_columns", &can_have_columns, py::arg("dtype"), py::arg("n"), py::arg("k"),
             "True if a plain W[n, k] can be stored input by input: it must consist of whole panels, without "
             "padding.");
  module.def("can_have_neurons", &can_have_neurons, py::arg("dtype"), py::arg("count"), py::arg("size"),
             "True if an MLP of `count` neurons and `size` inputs can be stored neuron by neuron.");
  module.def(
      "neuron_bytes",
      [](DType dtype, std::int64_t count, std::int64_t size) {
        return NeuronTable{.dtype = dtype, .count = count, .size = size}.bytes();
      },
      py::arg("dtype"), py::arg("count"), py::arg("size"),
      "Bytes of a NeuronTable. It has `count` records; each is a row of up and a column of down, of `size` "
      "elements each, padded with zeros to a multiple of RECORD_ALIGNMENT.");
  module.attr("RECORD_ALIGNMENT") = kRecordAlignment;
  module.def("can_be_compressed", &can_be_compressed, py::arg("n"), py::arg("k"),
             "True if a bfloat16 W[n, k] can be compressed: k must be a multiple of 8.");
  module.def("compressed_bytes", &checked_compressed_bytes, py::arg("n"), py::arg("k"), py::arg("outliers"),
             "Bytes of a compressed W[n, k] with places for `outliers` in each panel. A last panel of "
             "fewer than 64 outputs is not compressed. Raises ValueError if can_be_compressed is false, or "
             "for more outliers than elements.");
  module.def("max_outliers", &max_outliers, py::arg("panels"), py::arg("n"), py::arg("k"),
             "Number of places for outliers that each panel needs if a W[n, k], which pack_panels packed "
             "as bfloat16, is compressed. Raises ValueError like compressed_bytes.");
  module.def("compress_panels", &compress, py::arg("out"), py::arg("panels"), py::arg("n"), py::arg("k"),
             py::arg("outliers"),
             "Compresses `panels` into `out`, a writable buffer of compressed_bytes(n, k, outliers) bytes, "
             "without changing a value. `outliers` is at least max_outliers(...).");
  module.def("unpack_panels", &unpack, py::arg("panels"), py::arg("dtype"), py::arg("n"), py::arg("k"),
             "Returns W[n, k] as float32; the inverse of pack_panels.");
}

}  // namespace adaptrt::bindings
