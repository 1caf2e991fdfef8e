#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/modules.h"

namespace adaptrt::bindings {

/// Throws ConfigError for an id that no module has.
inline LoraModule lora_module_of(std::int64_t id) {
  const auto* info = find_lora_module(id);
  if (info == nullptr) throw ConfigError("there is no LoRA module with id " + std::to_string(id));
  return info->module;
}

}  // namespace adaptrt::bindings

namespace pybind11::detail {

/// A module is its id in Python.
template <>
struct type_caster<adaptrt::LoraModule> {
  PYBIND11_TYPE_CASTER(adaptrt::LoraModule, const_name("int"));

  bool load(handle source, bool convert) {
    make_caster<std::int64_t> id;
    if (!id.load(source, convert)) return false;
    value = adaptrt::bindings::lora_module_of(cast_op<std::int64_t>(id));
    return true;
  }
  static handle cast(adaptrt::LoraModule module, return_value_policy /*policy*/, handle /*parent*/) {
    return PyLong_FromLong(static_cast<long>(module));
  }
};

}  // namespace pybind11::detail
