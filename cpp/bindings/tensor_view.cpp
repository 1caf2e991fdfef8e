#include "tensor_view.h"

#include <pybind11/numpy.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "gil_safe_object.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// A deleter of views: keeps their array, and gives it up on whichever thread the last view ends.
class KeepAlive {
 public:
  explicit KeepAlive(py::array array) : array_(array.release().ptr(), &drop_reference) {
    drop_waiting_references();
  }
  void operator()(const void* /*data*/) { array_.reset(); }
  [[nodiscard]] py::object array() const { return py::reinterpret_borrow<py::object>(array_.get()); }

 private:
  std::shared_ptr<PyObject> array_;
};

TensorType type_from_name(const std::string& name) {
  if (name == "float32") return TensorType::kFloat32;
  if (name == "float16") return TensorType::kFloat16;
  // NumPy itself knows no bfloat16: files have it as two bytes without a meaning.
  if (name == "bfloat16" || name == "|V2") return TensorType::kBFloat16;
  if (name == "int32") return TensorType::kInt32;
  return TensorType::kOther;
}

bool is_torch_tensor(const py::object& object) {
  const std::string module = py::str(py::type::of(object).attr("__module__"));
  return module == "torch" || module.starts_with("torch.");
}

/// The tensor's memory as an array; bfloat16, which torch does not hand to NumPy, as int16.
py::array array_of_tensor(const py::object& tensor, const char* name, std::string& type_name) {
  const std::string device = py::str(tensor.attr("device"));
  if (device != "cpu") throw AdapterError(std::string(name) + " is on device " + device + "; accepted: cpu");
  py::object plain = tensor.attr("detach")();
  type_name = py::str(plain.attr("dtype"));
  type_name.erase(0, type_name.find('.') + 1);
  if (type_name == "bfloat16") plain = plain.attr("view")(py::module_::import("torch").attr("int16"));
  return plain.attr("numpy")();
}

/// Bytes from the first element's start to the last one's end.
std::size_t memory_span(const py::array& array) {
  std::size_t span = static_cast<std::size_t>(array.itemsize());
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    if (array.shape(i) == 0) return 0;
    span +=
        static_cast<std::size_t>(array.shape(i) - 1) * static_cast<std::size_t>(std::abs(array.strides(i)));
  }
  return span;
}

py::array contiguous(const py::array& array, const char* name) {
  if ((array.flags() & py::array::c_style) != 0) return array;
  if (memory_span(array) < static_cast<std::size_t>(array.nbytes())) {
    throw AdapterError(std::string(name) +
                       " is a view that repeats elements; pass an array that holds them all");
  }
  return py::module_::import("numpy").attr("ascontiguousarray")(array);
}

}  // namespace

std::optional<TensorView> tensor_view(const py::object& tensor, const char* name) {
  if (tensor.is_none()) return std::nullopt;
  std::string type_name;
  py::array array;
  if (py::isinstance<py::array>(tensor)) {
    array = py::reinterpret_borrow<py::array>(tensor);
    type_name = py::str(array.dtype());
  } else if (is_torch_tensor(tensor)) {
    array = array_of_tensor(tensor, name, type_name);
  } else {
    throw py::type_error(std::string(name) + " must be a NumPy array, a torch tensor or None, not " +
                         std::string(py::str(py::type::of(tensor).attr("__name__"))));
  }
  array = contiguous(array, name);
  TensorView view;
  view.data = static_cast<const std::byte*>(array.data());
  view.type = type_from_name(type_name);
  view.type_name = type_name;
  view.shape.assign(array.shape(), array.shape() + array.ndim());
  view.owner = std::shared_ptr<const void>(view.data, KeepAlive(array));
  return view;
}

py::object array_of(const std::optional<TensorView>& view) {
  if (!view) return py::none();
  const auto* keep = std::get_deleter<KeepAlive>(view->owner);
  if (keep == nullptr) throw std::logic_error("a TensorView that did not come from Python");
  return keep->array();
}

}  // namespace adaptrt::bindings
