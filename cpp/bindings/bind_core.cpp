#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/panels.h"
#include "bindings.h"

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
  if (n < 0 || k < 0 || first_row < 0 || rows.columns != k || first_row + rows.rows > n) {
    throw py::value_error("pack_panels: the source's rows do not lie within the matrix");
  }
  if (static_cast<std::size_t>(out.size * out.itemsize) < panel_bytes(dtype, n, k)) {
    throw py::value_error("pack_panels: the destination is smaller than panel_bytes");
  }
  const py::gil_scoped_release release;
  pack_panels(static_cast<std::byte*>(out.ptr), dtype, n, k, first_row, rows.rows,
              static_cast<const std::byte*>(rows.info.ptr), source_dtype, rows.stride);
}

py::array_t<float> unpack(const py::buffer& panels, DType dtype, std::int64_t n, std::int64_t k) {
  const py::buffer_info in = panels.request();
  if (n < 0 || k < 0 || static_cast<std::size_t>(in.size * in.itemsize) < panel_bytes(dtype, n, k)) {
    throw py::value_error("unpack_panels: the source is smaller than panel_bytes");
  }
  py::array_t<float> result({n, k});
  const PanelMatrix matrix{static_cast<const std::byte*>(in.ptr), dtype, n, k};
  float* out = result.mutable_data();
  const py::gil_scoped_release release;
  for (std::int64_t row = 0; row < n; ++row) unpack_panel_row(matrix, row, out + row * k);
  return result;
}

}  // namespace

void bind_core(py::module_& module) {
  py::native_enum<DType>(module, "DType", "enum.Enum", "Element types of weights, adapters and the KV cache.")
      .value("FLOAT32", DType::kFloat32)
      .value("FLOAT16", DType::kFloat16)
      .value("BFLOAT16", DType::kBFloat16)
      .finalize();
  module.def("dtype_name", &name_of, py::arg("dtype"), "'float32', 'float16' or 'bfloat16'.");
  module.def(
      "dtype_from_name",
      [](const std::string& name) {
        const auto dtype = dtype_from_name(name);
        if (!dtype) {
          throw ConfigError("dtype '" + name + "' is unknown; accepted: float32, float16, bfloat16");
        }
        return *dtype;
      },
      py::arg("name"), "The inverse of dtype_name. Raises ConfigError for another name.");
  module.def("panel_bytes", &panel_bytes, py::arg("dtype"), py::arg("n"), py::arg("k"),
             "Bytes of a packed weight W[n, k].");
  module.def("pack_panels", &pack, py::arg("panels"), py::arg("dtype"), py::arg("n"), py::arg("k"),
             py::arg("first_row"), py::arg("source"), py::arg("source_dtype"),
             "Packs rows first_row .. first_row + len(source) of W[n, k] into `panels`, a writable buffer.");
  module.def("unpack_panels", &unpack, py::arg("panels"), py::arg("dtype"), py::arg("n"), py::arg("k"),
             "The inverse of pack_panels: W[n, k] as float32.");
}

}  // namespace adaptrt::bindings
