#include "plan_context.h"

#include <cstdint>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "gil_safe_object.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// "ValueError: ...", without the places in the code that what() adds.
std::string text_of(const py::error_already_set& error) {
  return std::string(py::str(error.type().attr("__name__"))) + ": " + std::string(py::str(error.value()));
}

class PythonPlanContext final : public PlanContext {
 public:
  explicit PythonPlanContext(py::object context) : context_(std::move(context)) {}

  void set_input_shape(std::string_view tensor, std::span<const std::int64_t> dims) override {
    const py::gil_scoped_acquire gil;
    py::tuple shape(dims.size());
    for (std::size_t i = 0; i < dims.size(); ++i) shape[i] = dims[i];
    call("set_input_shape", tensor, shape);
  }

  void set_tensor_address(std::string_view tensor, void* address) override {
    const py::gil_scoped_acquire gil;
    call("set_tensor_address", tensor, reinterpret_cast<std::uintptr_t>(address));
  }

  void enqueue(void* stream) override {
    const py::gil_scoped_acquire gil;
    call("execute_async_v3", reinterpret_cast<std::uintptr_t>(stream));
  }

  std::unique_ptr<PlanContext> another() override {
    const py::gil_scoped_acquire gil;
    return std::make_unique<PythonPlanContext>(result_of<py::object>("another"));
  }

 private:
  template <class... Arguments>
  void call(const char* method, const Arguments&... arguments) {
    if (!result_of<bool>(method, arguments...)) {
      const py::str given = py::repr(py::make_tuple(arguments...));
      throw StepError("TensorRT refuses " + std::string(method) + std::string(given));
    }
  }

  template <class Result, class... Arguments>
  Result result_of(const char* method, const Arguments&... arguments) {
    try {
      return context_.object.attr(method)(arguments...).template cast<Result>();
    } catch (const py::error_already_set& error) {
      throw StepError(std::string(method) + ": " + text_of(error));
    } catch (const py::cast_error& error) {
      throw StepError(std::string(method) + ": " + error.what());
    }
  }

  GilSafeObject context_;
};

}  // namespace

std::unique_ptr<PlanContext> make_plan_context(py::object context) {
  return std::make_unique<PythonPlanContext>(std::move(context));
}

}  // namespace adaptrt::bindings
