#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>

#include "adaptrt/lora/layout_fields.h"
#include "adaptrt/lora/site_index.h"
#include "bind_struct.h"
#include "bindings.h"
#include "lora_casters.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_lora_layout(py::module_& module) {
  py::class_<ModuleSizes>(module, "ModuleSizes",
                          "Widths of A's input and B's output, of each of its experts.")
      .def_readonly("in_size", &ModuleSizes::in)
      .def_readonly("out_size", &ModuleSizes::out)
      .def_readonly("experts", &ModuleSizes::experts);
  py::native_enum<MatrixLayout>(module, "MatrixLayout", "enum.Enum", "Storage of an adapter's matrices.")
      .value("PANELS", MatrixLayout::kPanels, "In panels, as CPU kernels read them.")
      .value("ROWS", MatrixLayout::kRows, "Row-major, as CUDA kernels read them.")
      .finalize();
  bind_record<LoraPart>(module, "LoraPart", "A module's share of a linear layer's output.")
      .def_property_readonly("whole_out_size", &LoraPart::whole_out_size, "Rows of adapters' B.");
  bind_record<LoraSite>(module, "LoraSite", "A linear layer whose parts share an input, where adapters act.")
      .def_property_readonly("whole_in_size", &LoraSite::whole_in_size, "Columns of adapters' A.")
      .def(
          "most_rows_of_a",
          [](const LoraSite& site, std::int64_t total_rank) { return site.rows_of_a(total_rank, 0).count; },
          py::arg("total_rank"),
          "Number of rows of A[total_rank, in_size] on the rank that has most of them.")
      .def(
          "most_rows_of_b",
          [](const LoraSite& site, std::int64_t out_size) { return site.rows_of_b(out_size, 0).count; },
          py::arg("out_size"), "The same for B[out_size, rank].");
  bind_record<LoraLayout>(module, "LoraLayout", "Adapters that an engine accepts.")
      .def(py::init<>(), "The layout of an engine that was built without LoRA.")
      .def(
          "sizes_of",
          [](const LoraLayout& layout, std::int32_t layer, std::int64_t id) -> std::optional<ModuleSizes> {
            const SiteIndex index(layout);
            const ModulePlace* place = index.find(layer, lora_module_of(id));
            return place == nullptr ? std::nullopt : std::optional(place->sizes);
          },
          py::arg("layer"), py::arg("module"),
          "Returns ModuleSizes, or None if the layer does not have the module.");
}

}  // namespace adaptrt::bindings
