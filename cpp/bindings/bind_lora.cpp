#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/stats.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/host_pages.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/modules.h"
#include "adaptrt/lora/pack_adapter.h"
#include "adaptrt/lora/peft_cache_config.h"
#include "bind_struct.h"
#include "bindings.h"
#include "tensor_view.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

void bind_modules(py::module_& module) {
  py::native_enum<TensorParallelSplit>(module, "TensorParallelSplit", "enum.Enum",
                                       "Split of a module by tensor parallelism.")
      .value("NONE", TensorParallelSplit::kNone)
      .value("COLUMN", TensorParallelSplit::kColumn)
      .value("ROW", TensorParallelSplit::kRow)
      .finalize();
  py::class_<LoraModuleInfo>(module, "LoraModuleInfo", "One row of the table of modules.")
      .def_property_readonly("id", [](const LoraModuleInfo& info) { return static_cast<int>(info.module); })
      .def_readonly("name", &LoraModuleInfo::name)
      .def_readonly("split", &LoraModuleInfo::split)
      .def_readonly("is_served", &LoraModuleInfo::is_served)
      .def_property_readonly(
          "is_of_vocabulary", [](const LoraModuleInfo& info) { return is_of_vocabulary(info.module); },
          "True for modules as wide as the vocabulary (lm_head and embedding), whose rows are slices of it.")
      .def_property_readonly(
          "is_setting", [](const LoraModuleInfo& info) { return is_setting(info.module); },
          "True if it is not a layer but a number, in the rank's place, that applies to all requests of the "
          "adapter.")
      .def_property_readonly(
          "is_norm", [](const LoraModuleInfo& info) { return is_norm(info.module); },
          "True for norms. Adapters only have a shift of them, and the norm's number takes the layer's "
          "place.")
      .def_property_readonly(
          "parts",
          [](const LoraModuleInfo& info) {
            const auto parts = parts_of(info.module);
            py::typing::Tuple<py::str, py::ellipsis> names(parts.size());
            for (std::size_t i = 0; i < parts.size(); ++i) names[i] = py::str(info_of(parts[i]).name);
            return names;
          },
          "Names of the modules whose outputs form its output, in order; for modules that are not fused, its "
          "own name.")
      .def("__repr__", [](const LoraModuleInfo& info) {
        return "LoraModuleInfo(id=" + std::to_string(static_cast<int>(info.module)) + ", name='" +
               std::string(info.name) + "')";
      });
  module.attr("VOCABULARY_SLICE") = kVocabularySlice;
  module.attr("MOST_ROTARY_FACTOR") = kMostRotaryFactor;
  module.attr("NUM_TABLE_MODULES") = kNumLoraModules;
  module.def(
      "lora_modules",
      [] {
        const auto modules = lora_modules();
        return std::vector<LoraModuleInfo>(modules.begin(), modules.end());
      },
      "The table of modules, in the order of their ids.");
}

LoraConfig make_lora_config(std::uint64_t task_id, const py::object& weights, const py::object& config,
                            bool replace, std::int32_t active_from) {
  return {task_id, tensor_view(weights, "weights"), tensor_view(config, "config"), replace, active_from};
}

std::string describe(const std::optional<TensorView>& tensor) {
  if (!tensor) return "None";
  return std::string(py::repr(py::cast(tensor->shape))) + " " + tensor->type_name;
}

void bind_lora_config(py::module_& module) {
  py::class_<LoraConfig>(
      module, "LoraConfig",
      "Adapter of a request: its task_id and, with the first request, its tensors as hf_lora_convert writes "
      "them. weights is [rows, width] of float32, float16 or bfloat16; config is int32 [rows, 3 or 4] "
      "(module_id, layer, rank, vectors). Both may have a leading dimension of 1. Contiguous NumPy arrays "
      "and CPU torch tensors are kept, others are copied.")
      .def(py::init([](const FieldArgument<std::uint64_t>& task_id, const py::object& weights,
                       const py::object& config, bool replace, std::int32_t active_from) {
             return make_lora_config(detail::field_value(task_id, "LoraConfig", "task_id"), weights, config,
                                     replace, active_from);
           }),
           py::arg("task_id"), py::arg("weights") = py::none(), py::arg("config") = py::none(),
           py::arg("replace") = false, py::kw_only(), py::arg("active_from") = 0,
           "replace: True if the weights may differ from those cached for this task_id. active_from: first "
           "position of the request on which the adapter acts; the base model computes earlier tokens. For "
           "an aLoRA adapter it is the start of its invocation tokens (see invocation_start).")
      .def_static(
          "from_peft",
          [](const FieldArgument<std::uint64_t>& task_id, const py::object& directory,
             const py::object& engine, bool magnitudes_normalized, bool replace,
             std::optional<std::int32_t> active_from) {
            const py::object convert =
                py::module_::import("adaptrt.runtime.lora_config").attr("tensors_from_peft");
            const py::tuple tensors = convert(directory, engine, magnitudes_normalized, active_from);
            return make_lora_config(detail::field_value(task_id, "LoraConfig", "task_id"), tensors[0],
                                    tensors[1], replace, active_from.value_or(0));
          },
          py::arg("task_id"), py::arg("directory"), py::arg("engine"), py::kw_only(),
          py::arg("magnitudes_normalized") = false, py::arg("replace") = false,
          py::arg("active_from") = py::none(),
          "Reads an adapter of PEFT or MLX-LM for an engine, without writing files. `directory` is the "
          "adapter's directory, or {directory: weight} for a weighted sum of LoRA adapters. `engine` is an "
          "engine directory, or a loaded engine (load_engine, Executor.engine), which is faster. DoRA "
          "magnitudes that are not marked as normalised are normalised with the engine's weights, unless "
          "`magnitudes_normalized` is True. An aLoRA adapter needs `active_from`. Raises AdapterError with "
          "every tensor and field that cannot be used.")
      .def_readonly("task_id", &LoraConfig::task_id)
      .def_property_readonly(
          "weights", [](const LoraConfig& self) { return array_of(self.weights); }, "The array, or None.")
      .def_property_readonly(
          "config", [](const LoraConfig& self) { return array_of(self.config); }, "The array, or None.")
      .def_readonly("replace", &LoraConfig::replace)
      .def_readonly("active_from", &LoraConfig::active_from)
      .def("__repr__",
           [](const LoraConfig& self) {
             return "LoraConfig(task_id=" + std::to_string(self.task_id) +
                    ", weights=" + describe(self.weights) + ", config=" + describe(self.config) +
                    ", replace=" + (self.replace ? "True" : "False") +
                    (self.active_from == 0 ? "" : ", active_from=" + std::to_string(self.active_from)) + ")";
           })
      .def(py::pickle(
          [](const LoraConfig& self) {
            return py::make_tuple(self.task_id, array_of(self.weights), array_of(self.config), self.replace,
                                  self.active_from);
          },
          [](const py::tuple& state) {
            return make_lora_config(state[0].cast<std::uint64_t>(), state[1], state[2], state[3].cast<bool>(),
                                    state[4].cast<std::int32_t>());
          }));
}

void bind_cache_config(py::module_& module) {
  bind_struct<PeftCacheConfig>(module, "PeftCacheConfig", "Sizes of the two levels of the LoRA cache.")
      .def(
          "validate", [](const PeftCacheConfig& self) { return self.validate().list(); },
          "Returns every problem of the fields, without the engine's limits; [] if there is none.");
  bind_struct<LoraCacheStats>(module, "LoraCacheStats", "Counters and present contents of the LoRA cache.");
  bind_struct<LoraCacheEntry>(
      module, "LoraCacheEntry", "An adapter in the LoRA cache.",
      Field{"task_id", &LoraCacheEntry::task_id, "Id by which requests name the adapter."},
      Field{"host_bytes", &LoraCacheEntry::host_bytes, "Bytes on the host level."},
      Field{"device_pages", &LoraCacheEntry::device_pages,
            "Number of pages that it needs on the device level."},
      Field{"on_device", &LoraCacheEntry::on_device, "True if it is on the device level now."},
      Field{"pinned", &LoraCacheEntry::pinned, "True if it stays on both levels while unused."},
      Field{"users", &LoraCacheEntry::users, "Number of requests that use it."},
      Field{"outdated", &LoraCacheEntry::outdated,
            "True if it leaves the cache before others that are not."});
  bind_struct<LoraCacheSizes>(
      module, "LoraCacheSizes", "Sizes of the LoRA cache's levels.",
      Field{"host_bytes", &LoraCacheSizes::host_bytes, "Bytes of the host level."},
      Field{"page_bytes", &LoraCacheSizes::page_bytes, "Bytes of a device page."},
      Field{"device_pages", &LoraCacheSizes::device_pages, "Pages of the device level."},
      Field{"max_host_bytes", &LoraCacheSizes::max_host_bytes,
            "Bytes up to which the host level grows. It does not grow if this is not above host_bytes."},
      Field{"max_device_pages", &LoraCacheSizes::max_device_pages,
            "Pages up to which the device level grows. It does not grow if this is not above device_pages."});
  module.def(
      "resolve_cache_sizes",
      [](const PeftCacheConfig& config, const LoraLayout& layout, std::size_t free_bytes,
         std::int32_t max_batch_size) {
        return resolve_cache_sizes(
            config, layout,
            LoraCacheDemand{
                .free_bytes = free_bytes, .free_host_bytes = free_bytes, .max_batch_size = max_batch_size});
      },
      py::arg("config"), py::arg("layout"), py::arg("free_bytes"), py::arg("max_batch_size") = 0,
      "Returns LoraCacheSizes for an engine with this LoraLayout. free_bytes: free memory for both levels. "
      "Levels without an explicit size grow to hold max_batch_size adapters. Raises ConfigError if a level "
      "is "
      "too small, with its size and the needed size.");
}

/// Keeps an adapter admitted, like a request. A separate class, because each admit() counts as a user.
struct AdmittedAdapter {
  std::shared_ptr<const HostAdapter> adapter;
};

py::array_t<float> matrix(const std::vector<float>& values, std::size_t rows) {
  const auto columns = static_cast<py::ssize_t>(values.size() / rows);
  py::array_t<float> result({static_cast<py::ssize_t>(rows), columns});
  std::ranges::copy(values, result.mutable_data());
  return result;
}

py::object vector_or_none(const std::vector<float>& values) {
  if (values.empty()) return py::none();
  return py::array_t<float>(static_cast<py::ssize_t>(values.size()), values.data());
}

/// [(module_id, layer, expert, A, B, magnitude or None, shift or None)] of what lies in the device's pages.
py::list read_device(const DeviceLease& lease, const LoraLayout& layout) {
  py::list result;
  for (const UnpackedModule& entry : unpack_adapter(lease.adapter(), layout)) {
    const auto rank = static_cast<std::size_t>(entry.rank);
    result.append(py::make_tuple(static_cast<int>(entry.module), entry.layer, entry.expert,
                                 matrix(entry.a, rank), matrix(entry.b, entry.b.size() / rank),
                                 vector_or_none(entry.magnitude), vector_or_none(entry.shift)));
  }
  return result;
}

void bind_cache(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<AdmittedAdapter>(module, "AdmittedAdapter",
                              "Keeps an adapter in the cache while this object lives.")
      .def_property_readonly("task_id", [](const AdmittedAdapter& self) { return self.adapter->task_id(); })
      .def_property_readonly("generation",
                             [](const AdmittedAdapter& self) { return self.adapter->generation(); })
      .def_property_readonly("bytes", [](const AdmittedAdapter& self) { return self.adapter->bytes(); });
  py::class_<DeviceLease>(module, "DeviceLease", "Keeps an adapter on the device while this object lives.");
  py::class_<LoraCache>(module, "LoraCache",
                        "The two-level LoRA cache without an executor, for tests and tools.")
      .def(py::init([](LoraLayout layout, const LoraCacheSizes& sizes, std::int32_t num_adapters,
                       const PeftCacheConfig& config) {
             config.validate().throw_if_any<ConfigError>("PeftCacheConfig");
             auto pages = std::make_unique<HostPages>(sizes.page_bytes, sizes.pages_to_make());
             return std::make_unique<LoraCache>(std::move(layout), std::move(pages),
                                                LoraCacheOptions{.host_bytes = sizes.host_bytes,
                                                                 .device_pages = sizes.device_pages,
                                                                 .max_host_bytes = sizes.max_host_bytes,
                                                                 .num_adapters = num_adapters,
                                                                 .storage = config.storage()});
           }),
           py::arg("layout"), py::arg("sizes"), py::arg("num_adapters") = 0,
           py::arg("config") = PeftCacheConfig{},
           "Levels that may grow do so to hold `num_adapters` of the largest adapter. config: only its "
           "lora_storage is used.")
      .def(
          "admit",
          [](LoraCache& self, const LoraConfig& config) { return AdmittedAdapter{self.admit(config)}; },
          py::arg("config"), Release(),
          "Admits a request's LoraConfig, like an executor. Raises AdapterError, PeftTaskNotCachedError, "
          "LoraCacheFullError.")
      .def(
          "acquire", [](LoraCache& self, const AdmittedAdapter& held) { return self.acquire(held.adapter); },
          py::arg("adapter"), Release(), "Returns a DeviceLease, or None if there is no room now.")
      .def(
          "pages_needed",
          [](const LoraCache& self, const AdmittedAdapter& held) { return self.pages_needed(*held.adapter); },
          py::arg("adapter"))
      .def(
          "is_leased",
          [](const LoraCache& self, const AdmittedAdapter& held) { return self.is_leased(*held.adapter); },
          py::arg("adapter"))
      .def("obtainable_pages", &LoraCache::obtainable_pages)
      .def("pin", &LoraCache::pin, py::arg("task_id"), Release())
      .def("unpin", &LoraCache::unpin, py::arg("task_id"))
      .def("unload", &LoraCache::unload, py::arg("task_id"))
      .def("set_outdated", &LoraCache::set_outdated, py::arg("task_id"), py::arg("outdated"))
      .def("contains", &LoraCache::contains, py::arg("task_id"))
      .def("list", &LoraCache::list)
      .def("stats", &LoraCache::stats)
      .def("check_invariants", &LoraCache::check_invariants)
      .def(
          "read_device",
          [](const LoraCache& self, const DeviceLease& lease) { return read_device(lease, self.layout()); },
          py::arg("lease"),
          "Reads the adapter from the device's pages: [(module_id, layer, expert, A[rank, in], B[out, rank], "
          "magnitude[out] or None, shift[out] or None)], float32. Fused modules are listed as their parts.");
}

}  // namespace

void bind_lora(py::module_& module) {
  bind_modules(module);
  bind_lora_config(module);
  bind_cache_config(module);
  bind_cache(module);
}

}  // namespace adaptrt::bindings
