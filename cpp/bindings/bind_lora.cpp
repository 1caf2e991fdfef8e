#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/modules.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

void bind_modules(py::module_& module) {
  py::native_enum<TensorParallelSplit>(module, "TensorParallelSplit", "enum.Enum",
                                       "How tensor parallelism cuts a module.")
      .value("NONE", TensorParallelSplit::kNone)
      .value("COLUMN", TensorParallelSplit::kColumn)
      .value("ROW", TensorParallelSplit::kRow)
      .finalize();
  py::class_<ModelShape>(module, "ModelShape", "The sizes that a module's widths follow from.")
      .def(py::init([](std::int64_t hidden_size, std::int64_t num_attention_heads, std::int64_t num_key_value_heads,
                       std::int64_t head_dim, std::int64_t intermediate_size) {
             return ModelShape{hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size};
           }),
           py::kw_only(), py::arg("hidden_size"), py::arg("num_attention_heads"), py::arg("num_key_value_heads"),
           py::arg("head_dim"), py::arg("intermediate_size"))
      .def_readonly("hidden_size", &ModelShape::hidden_size)
      .def_readonly("num_attention_heads", &ModelShape::num_attention_heads)
      .def_readonly("num_key_value_heads", &ModelShape::num_key_value_heads)
      .def_readonly("head_dim", &ModelShape::head_dim)
      .def_readonly("intermediate_size", &ModelShape::intermediate_size);
  py::class_<LoraModuleInfo>(module, "LoraModuleInfo", "One row of the table of modules.")
      .def_property_readonly("id", [](const LoraModuleInfo& info) { return static_cast<int>(info.module); })
      .def_readonly("name", &LoraModuleInfo::name)
      .def_readonly("split", &LoraModuleInfo::split)
      .def_readonly("in_decoder_layer", &LoraModuleInfo::in_decoder_layer)
      .def(
          "sizes",
          [](const LoraModuleInfo& info, const ModelShape& shape) {
            const auto sizes = module_sizes(info.module, shape);
            if (!sizes) throw ConfigError("module " + std::string(info.name) + " is not part of a decoder layer");
            return py::make_tuple(sizes->in, sizes->out);
          },
          py::arg("shape"), "(input width of A, output width of B) for a model of this shape.")
      .def("__repr__", [](const LoraModuleInfo& info) {
        return "LoraModuleInfo(id=" + std::to_string(static_cast<int>(info.module)) + ", name='" +
               std::string(info.name) + "')";
      });
  module.def(
      "lora_modules",
      [] {
        const auto modules = lora_modules();
        return std::vector<LoraModuleInfo>(modules.begin(), modules.end());
      },
      "The table of modules, in the order of their ids.");
}

}  // namespace

void bind_lora(py::module_& module) { bind_modules(module); }

}  // namespace adaptrt::bindings
