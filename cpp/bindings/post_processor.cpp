#include "post_processor.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "gil_safe_object.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// torch.from_numpy, where torch is imported; else None.
py::object tensor_maker() {
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("torch")) return py::none();
  return py::getattr(modules["torch"], "from_numpy", py::none());
}

/// Shares the row's memory, for as long as Python keeps it.
py::object logits_of(const PostProcessedRow& row, const py::object& make_tensor) {
  using Owner = std::shared_ptr<std::vector<float>>;
  auto owned = std::make_unique<Owner>(row.logits);
  const py::capsule owner(owned.release(),
                          [](void* pointer) { std::default_delete<Owner>{}(static_cast<Owner*>(pointer)); });
  const auto size = static_cast<py::ssize_t>(row.logits->size());
  py::object array = py::array_t<float>({py::ssize_t{1}, py::ssize_t{1}, size}, row.logits->data(), owner);
  return make_tensor.is_none() ? array : make_tensor(array);
}

py::list tokens_of(const PostProcessedRow& row) {
  py::list tokens(row.tokens.size());
  for (std::size_t i = 0; i < row.tokens.size(); ++i) tokens[i] = row.tokens[i];
  py::list beams;
  beams.append(tokens);
  return beams;
}

class PythonPostProcessor final : public LogitsPostProcessor {
 public:
  explicit PythonPostProcessor(py::object function) : function_(std::move(function)) {}

  std::shared_ptr<void> enter() override { return std::make_shared<py::gil_scoped_acquire>(); }

  void process(PostProcessedRow& row) override {
    row.error = error_of([&] {
      function_.object(row.request_id, logits_of(row, tensor_maker()), tokens_of(row), kStream,
                       row.client_id);
    });
  }

  void process_batch(std::span<PostProcessedRow> rows) override {
    const std::string error = error_of([&] {
      const py::object make_tensor = tensor_maker();
      py::list ids;
      py::list logits;
      py::list tokens;
      py::list client_ids;
      for (const auto& row : rows) {
        ids.append(row.request_id);
        logits.append(logits_of(row, make_tensor));
        tokens.append(tokens_of(row));
        client_ids.append(row.client_id);
      }
      function_.object(ids, logits, tokens, kStream, client_ids);
    });
    for (auto& row : rows) row.error = error;
  }

  [[nodiscard]] bool equals(const LogitsPostProcessor& other) const override {
    return function().equal(dynamic_cast<const PythonPostProcessor&>(other).function());
  }
  [[nodiscard]] const py::object& function() const { return function_.object; }

 private:
  static constexpr int kStream = 0;

  /// Why a call failed; empty when it did not.
  template <class Call>
  static std::string error_of(Call call) {
    const py::gil_scoped_acquire gil;
    try {
      call();
      return "";
    } catch (const py::error_already_set& error) {
      return "logits post-processor: " + std::string(py::str(error.type().attr("__name__"))) + ": " +
             std::string(py::str(error.value()));
    } catch (const std::exception& error) {
      return std::string("logits post-processor: ") + error.what();
    }
  }

  GilSafeObject function_;
};

}  // namespace

PostProcessorFunction make_post_processor(py::object function) {
  return {std::make_shared<PythonPostProcessor>(std::move(function))};
}

py::object function_of(const PostProcessorFunction& processor) {
  return dynamic_cast<const PythonPostProcessor&>(*processor.processor).function();
}

}  // namespace adaptrt::bindings
