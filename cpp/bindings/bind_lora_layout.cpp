#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/site_index.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

LoraModule module_of(std::int64_t id) {
  const auto* info = find_lora_module(id);
  if (info == nullptr) throw ConfigError("there is no LoRA module with id " + std::to_string(id));
  return info->module;
}

}  // namespace

void bind_lora_layout(py::module_& module) {
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

}  // namespace adaptrt::bindings
