#include "adaptrt/core/error.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

template <class Error>
py::object register_error(py::module_& module, const char* name, const py::object& base, const char* doc) {
  py::object type = py::register_exception<Error>(module, name, base);
  type.attr("__module__") = "adaptrt";
  type.attr("__doc__") = doc;
  return type;
}

}  // namespace

void bind_errors(py::module_& module) {
  // pybind11 tries the newest translator first, so bases, which stand before their children in the table,
  // catch last.
  register_error<AdaptrtError>(module, "AdaptrtError", py::reinterpret_borrow<py::object>(PyExc_Exception),
                               "Base of every error that AdaptRT raises on purpose.");
#define ADAPTRT_BIND_ERROR(name, base, doc) register_error<name>(module, #name, module.attr(#base), doc);
  ADAPTRT_ERROR_TABLE(ADAPTRT_BIND_ERROR)
#undef ADAPTRT_BIND_ERROR
}

}  // namespace adaptrt::bindings
